"""Runs with damaged files are resumed from the undamaged ones, or refused. Both are reported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_training_run import RECIPE, SHORT, had_their_groups, leftovers, lines, only_run, train

pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 6


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run with checkpoints after steps 4 and 6."""
    runs = tmp_path_factory.mktemp("runs")
    overrides = [
        "data.eval_tasks=0",
        "model.warm_start.steps=5",
        f"trainer.steps={STEPS}",
        "trainer.checkpoint_every=2",
    ]
    result = train(RECIPE, runs, *SHORT, *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    return only_run(runs)


def resume_after(stopped: Path, tmp_path: Path, damage: Callable[[Path], None]) -> tuple[Path, int, str]:
    """Two more steps of a damaged copy: (its directory, exit code, what was printed)."""
    run_dir = tmp_path / stopped.name
    shutil.copytree(stopped, run_dir)
    damage(run_dir)
    words = [sys.executable, "-m", "penstock.cli.main", "resume", str(run_dir), f"trainer.steps={STEPS + 2}"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=400)
    assert leftovers(run_dir) == []
    return run_dir, result.returncode, result.stdout + result.stderr


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def test_a_checkpoint_cut_short_is_passed_over_for_the_one_before(stopped: Path, tmp_path: Path) -> None:
    run_dir, code, output = resume_after(
        stopped, tmp_path, lambda run_dir: cut(run_dir / "checkpoints" / "step_6" / "model.safetensors")
    )
    assert code == 0, output
    events = {event["event"]: event for event in lines(run_dir / "events.jsonl")}
    assert (
        "step_6" in events["checkpoint_skipped"]["path"]
        and "model.safetensors" in events["checkpoint_skipped"]["reason"]
    )
    assert (events["resumed"]["step"], events["resumed"]["revived"]) == (4, 32)
    assert had_their_groups(STEPS + 2, json.loads((run_dir / "summary.json").read_text())["ledger"])


def test_without_a_whole_checkpoint_there_is_nothing_to_go_on_from(stopped: Path, tmp_path: Path) -> None:
    def damage(run_dir: Path) -> None:
        for path in run_dir.glob("checkpoints/step_*/model.safetensors"):
            cut(path)

    _, code, output = resume_after(stopped, tmp_path, damage)
    assert code == 1
    assert "all checkpoints are damaged" in output and "step_4" in output and "remove them to start over" in output


def test_a_damaged_index_is_named_with_its_remedy(stopped: Path, tmp_path: Path) -> None:
    _, code, output = resume_after(
        stopped,
        tmp_path,
        lambda run_dir: (run_dir / "pool" / "index" / "data.mdb").write_bytes(b"nonsense" * 4096) and None,
    )
    assert code == 1
    assert "pool/index cannot be read" in output and "move it away" in output


def test_without_its_pool_a_run_goes_on_from_the_sums_of_its_checkpoint(stopped: Path, tmp_path: Path) -> None:
    run_dir, code, output = resume_after(stopped, tmp_path, lambda run_dir: shutil.rmtree(run_dir / "pool"))
    assert code == 0, output
    assert "pool_lost" in {event["event"] for event in lines(run_dir / "events.jsonl")}
    ledger = json.loads((run_dir / "summary.json").read_text())["ledger"]
    assert had_their_groups(STEPS + 2, ledger)
    assert ledger.pop("admitted") == sum(ledger.values())
