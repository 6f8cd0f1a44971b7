"""An engine of others takes turns with the trainer. It is killed while it is asleep, and the run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_deaths import ended_well
from test_training_run import RECIPE, SHORT, leftovers, lines, only_run, train

pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 6
TURNS = "scheduler={mode: colocated, max_staleness: 1, over_sampling: 1.5}"


def test_an_engine_gives_its_memory_to_the_trainer_and_dies_asleep(tmp_path: Path) -> None:
    python, stand_in = tmp_path / "python", Path(__file__).parent / "sglang_stand_in.py"
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] || {{ shift 2; set {stand_in} "$@"; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    died = tmp_path / "died"
    words = [*SHORT, TURNS, f"trainer.steps={STEPS}", "rollout.engine=sglang", f"rollout.python={python}"]
    result = train(RECIPE, tmp_path / "runs", *words, f"rollout.args=[--turns, '4', --died, {died}]")
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = only_run(tmp_path / "runs")
    summary = ended_well(run_dir, STEPS)
    assert died.exists()
    assert summary["ledger"].get("failed", 0) == 0 and summary["staleness_max"] <= 1
    assert summary["kl_engine_trainer"] < 1e-4, "every token was sampled by the weights that its label says"
    events = lines(run_dir / "events.jsonl")
    exits = [event["name"] for event in events if event.get("state") == "exited" and event["event"] == "process"]
    assert exits.count("rollout-0") == 2, "once in the middle, and at the end"
    assert {event["event"] for event in events} >= {"server_back"}
    assert leftovers(run_dir) == [] and json.loads((run_dir / "state.json").read_text())["status"] == "completed"
