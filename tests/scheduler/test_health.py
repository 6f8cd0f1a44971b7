"""Alarms of the scheduler speak of what lasts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from penstock.alarms import Alarms
from penstock.config import Config
from penstock.scheduler.health import Health
from penstock.types import LearnerState

QUIET: dict[str, Any] = {
    "dispatcher": SimpleNamespace(oldest_wait_s=lambda: 0.0, policy=SimpleNamespace(max_wait_s=1.0)),
    "supply": SimpleNamespace(bias=SimpleNamespace(check_step=lambda: None), remedy_for_stale_work="train less often"),
    "lengths": SimpleNamespace(trust=SimpleNamespace(alarm=None)),
    "tuning": SimpleNamespace(is_on=False),
}
"""Parts without any condition of their own."""


def alarms(steps: Sequence[tuple[int, int]]) -> list[str]:
    """Of a run whose steps had so many of 100 tokens too old, and made so many of 100 ready episodes too old."""
    found = Alarms()
    health = Health(Config(), **cast(dict[str, Any], QUIET), alarms=found)
    for masked, aged in steps:
        metrics = {"tokens_masked_stale": float(masked), "tokens": 100.0 - masked, "samples": 100.0}
        health.check_step(LearnerState(policy_version=1, entropy=1.0, metrics=metrics), num_aged=aged)
    return found.take()


def test_one_step_with_stale_tokens_is_no_alarm() -> None:
    assert alarms([(0, 0)] * 10 + [(90, 0)] + [(0, 0)] * 20) == []
    assert alarms([(90, 90)]) == []


def test_stale_work_that_lasts_is_one_alarm() -> None:
    (alarm,) = alarms([(20, 0)] * 30)
    assert alarm == (
        "stale work: 20% of the tokens of the latest 5 steps and 0 ready episodes were too old to train: "
        "train less often"
    )
    assert len(alarms([(0, 15)] * 30)) == 1


def test_stale_work_that_comes_back_is_told_again() -> None:
    assert len(alarms([(20, 0)] * 20 + [(0, 0)] * 40 + [(20, 0)] * 20)) == 2
