"""What others wrote, unmodified, trains the tiny model: Gymnasium, GEM, a program with an OpenAI client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_training_run import leftovers, lines, only_run, train

pytestmark = [pytest.mark.integration, pytest.mark.long]

NUM_STEPS = 6
EXAMPLES = {
    "gym": ["model.warm_start={steps: 40, batch_size: 32}", "trainer.groups_per_step=4"],
    "gem": ["model.warm_start={steps: 30, batch_size: 6}", "trainer.groups_per_step=2"],
    "agent": ["model.warm_start={steps: 40, batch_size: 32}", "trainer.groups_per_step=4"],
}
"""Just long enough to write an action now and then: groups whose members all earn the same teach nothing."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_it_trains(tmp_path: Path, example: str) -> None:
    short = [f"trainer.steps={NUM_STEPS}", "data.eval_tasks=4", "observe.progress=false"]
    result = train(example, tmp_path, *short, *EXAMPLES[example])
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = only_run(tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == NUM_STEPS
    assert summary["kl_engine_trainer"] is None or summary["kl_engine_trainer"] < 1e-4
    ledger = summary["ledger"]
    assert ledger.pop("admitted") == sum(ledger.values()) and ledger["failed"] == 0
    rewards: set[float | None] = {step["reward"] for step in lines(run_dir / "metrics.jsonl")}
    assert len(rewards - {None}) > 1, "what the policy does decides what it earns"
    assert leftovers(run_dir) == []
