"""`penstock train` with a reward of the user's own, slower than generation, and environments in their own processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_training_run import RECIPE, SHORT, leftovers, lines, only_run, train

pytestmark = [pytest.mark.integration, pytest.mark.long]

MINE = '''
import time

from penstock.envs.single_turn import SingleTurn


class Apart(SingleTurn):
    """As it is, in a process of its own."""

    isolated = True


def in_place(answer, payload):
    """The share of letters where they should be, slowly."""
    time.sleep(0.05)
    right = payload["answer"]
    return sum(a == b for a, b in zip(answer, right, strict=False)) / max(len(right), len(answer), 1)
'''


def test_slow_rewards_and_isolated_environments_train(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(MINE)
    tmp_path.chmod(0o755)  # the sandbox of a reward has a user of its own, if root makes it
    runs = tmp_path / "runs"
    overrides = [
        *(f"env.name={mine}:Apart", f"env.reward={mine}:in_place", "env.reward_workers=4"),
        *("env.penalize_truncation=false", "trainer.steps=4", "trainer.groups_per_step=4", "data.eval_tasks=8"),
    ]
    result = train(RECIPE, runs, *SHORT, *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = only_run(runs)
    steps = lines(run_dir / "metrics.jsonl")
    assert len(steps) == 4 and all(0 < step["reward"] < 1 for step in steps)
    ends = [event for event in lines(run_dir / "events.jsonl") if event["event"] == "process_totals"]
    (counters,) = [event["counters"] for event in ends if event["process"] == "env-0"]
    assert counters["scored"] >= 4 * 4 * 8 and not counters.get("score_timeouts"), "whatever was trained was scored"
    assert any(step["ledger"]["rewarding"] for step in steps), "the ledger knows who waits for a reward"
    assert not leftovers(run_dir)
