"""One short training run, and one that plays only; every test here looks at what they left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_training_run import RECIPE, SHORT, had_their_groups, leftovers, lines, only_run, train

from penstock.dashboard.opened_run import OpenedRun, Requests

pytestmark = pytest.mark.integration

STEPS = 4
OBSERVED = ["observe.plots=true", "observe.trackers=[tensorboard]"]


def penstock(*words: object) -> str:
    """Run a command; return what it prints."""
    command = [sys.executable, "-m", "penstock.cli.main", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a training run that is complete."""
    runs = tmp_path_factory.mktemp("trained")
    result = train(RECIPE, runs, *SHORT, f"trainer.steps={STEPS}", "data.eval_tasks=8", *OBSERVED)
    assert result.returncode == 0, result.stdout + result.stderr
    return only_run(runs)


def test_it_is_complete_and_its_books_are_right(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == summary["policy_version"] == STEPS
    assert summary["staleness_max"] <= 1 and summary["kl_engine_trainer"] < 1e-4
    ledger = summary["ledger"]
    assert ledger.pop("admitted") == sum(ledger.values())
    assert had_their_groups(STEPS, ledger)
    deciders = {line["decider"] for line in lines(trained / "timeline.jsonl") if line["kind"] == "decision"}
    assert deciders >= {"admission", "dispatch", "trigger", "feedback"}


def test_it_leaves_its_files_and_no_process(trained: Path) -> None:
    for name in ("config.yaml", "state.json", "timeline.jsonl", "plots/reward.png", "plots/timeline.png"):
        assert (trained / name).stat().st_size > 0, name
    assert (trained / "checkpoints" / f"step_{STEPS}" / "model.safetensors").exists()
    assert list((trained / "tensorboard").iterdir())
    assert leftovers(trained) == []


def test_its_status_says_what_its_summary_says(trained: Path) -> None:
    told = json.loads(penstock("status", trained, "--json"))
    assert told["status"] == "completed", told
    assert trained.name in penstock("runs", f"--runs-dir={trained.parent}")
    assert "env-0" in json.loads((trained / "state.json").read_text())["processes"]
    penstock("logs", trained)


def test_its_trajectories_are_shown(trained: Path) -> None:
    assert penstock("trajectories", trained, "--best").count("reward") >= 1


def test_its_groups_and_tokens_are_shown_from_pool_and_samples(trained: Path, tmp_path: Path) -> None:
    samples = sorted((trained / "trajectories").glob("step_*.jsonl"))
    rows = [row for file in samples for row in lines(file)]
    assert rows and all(row["training_samples"] for row in rows)
    shown = OpenedRun(trained, Requests()).trajectories
    counts = shown.groups.page()["counts"]
    assert counts["trained"] > 0 and sum(counts.values()) == shown.groups.page()["total"]
    copy = tmp_path / trained.name
    shutil.copytree(trained, copy, ignore=shutil.ignore_patterns("*.seg", "checkpoints"))
    without_pool = OpenedRun(copy, Requests()).trajectories
    for row in rows:
        found, kept = (each.episode(row["group"], row["episode"]) for each in (shown, without_pool))
        assert found["tokens"] and found["tokens"] == kept["tokens"] and found["turns"] == kept["turns"]
        assert sum(len(strip["texts"]) for strip in found["tokens"]) == row["response_tokens"]


@pytest.mark.long
def test_its_checkpoint_is_played_without_training(trained: Path, tmp_path: Path) -> None:
    words = ["rollout", RECIPE, f"runs_dir={tmp_path}", "synthesis.tasks=5", "observe.progress=false"]
    penstock(*words, "--checkpoint", trained.name, "--runs-dir", trained.parent)
    played = only_run(tmp_path)
    summary = json.loads((played / "summary.json").read_text())
    assert (summary["status"], summary["tasks_played"]) == ("completed", 5)
    rows = [row for file in (played / "trajectories" / "rollout").glob("*.jsonl") for row in lines(file)]
    assert len(rows) == 5 * 8, "each trajectory once"
    assert set(json.loads((played / "state.json").read_text())["processes"]) == {"controller", "rollout-0", "env-0"}
    assert leftovers(played) == []
