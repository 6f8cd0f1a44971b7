"""The errors and alarms of a run in which one group after the other fails."""

from __future__ import annotations

import pytest

from penstock.alarms import Alarms
from penstock.config import Config
from penstock.scheduler.failure_budget import FailureBudget, command_for
from penstock.types import Purpose, Task


def test_the_last_failure_comes_with_the_command_that_plays_it() -> None:
    budget = FailureBudget(max_filtered=10, alarms=Alarms())
    errors = [budget.fail_group("it broke", command="penstock env try x") for _ in range(FailureBudget.max_failed)]
    assert errors[:-1] == [None] * (FailureBudget.max_failed - 1)
    expected = "20 groups in a row failed; the last error was: it broke; `penstock env try x` plays that task by itself"
    assert str(errors[-1]) == expected


@pytest.mark.parametrize(
    ("run_id", "purpose", "name", "command"),
    [
        ("first", "train", "single_turn", "penstock env try runs/first/config.yaml --task 15"),
        ("first", "eval", "single_turn", None),
        ("first", "train", "atropos", None),
        (None, "train", "single_turn", None),
    ],
)
def test_the_command_names_the_runs_own_configuration_and_the_index(
    run_id: str | None, purpose: Purpose, name: str, command: str | None
) -> None:
    config = Config.model_validate(
        {"run_id": run_id, "env": {"name": name}, "data": {"source": "seeds", "eval_tasks": 0}}
    )
    assert command_for(config, Task(task_id="rows/16", tag="any", index=15, purpose=purpose)) == command
