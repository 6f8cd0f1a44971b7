"""Two environments trained together and validated meanwhile; then the same tasks once more, with `penstock eval`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_training_run import lines, only_run, train

pytestmark = [pytest.mark.integration, pytest.mark.long]

SHORT = ["data.eval_tasks=12", "model.warm_start.steps=5", "trainer.steps=5", "trainer.groups_per_step=4"]


def test_a_mixture_is_trained_validated_and_evaluated(tmp_path: Path) -> None:
    trained = train("mixture", tmp_path / "runs", *SHORT, "validation.every=2", "scheduler.group_filter=[]")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    run_dir = only_run(tmp_path / "runs")
    evaluations = [event for event in lines(run_dir / "events.jsonl") if event["event"] == "evaluation"]
    assert [evaluations[0]["when"], evaluations[-1]["when"]] == ["before", "after"] and len(evaluations) >= 3
    assert all(event["tags"].keys() == {"game", "words"} and event["episodes"] == 96 for event in evaluations)
    metrics = lines(run_dir / "metrics.jsonl")
    played = {tag: sum(line.get(f"episodes/{tag}", 0) for line in metrics) for tag in ("game", "words")}
    assert played["game"] > played["words"] > 0

    command = [sys.executable, "-m", "penstock.cli.main", "eval", str(run_dir / "config.yaml")]
    results = tmp_path / "found.json"
    words = ["--checkpoint", str(run_dir), "--json", str(results), f"runs_dir={tmp_path / 'evaluations'}"]
    again = subprocess.run([*command, *words], capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "pass@4" in again.stdout
    found, eval_dir = json.loads(results.read_text()), only_run(tmp_path / "evaluations")
    assert found == json.loads((eval_dir / "evaluation.json").read_text())
    assert found["reward"] == evaluations[-1]["reward"], "the same tasks, seeds and weights"
    assert found["tags"].keys() == {"game", "words"}
    assert not (eval_dir / "metrics.jsonl").read_text(), "nothing was trained"
