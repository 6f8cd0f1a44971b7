"""`penstock eval`: what it refuses before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_commands import penstock

from penstock.cli.train import AS_IT_IS
from penstock.config import load_config

CONFIG = "data: {source: seeds}\nenv: {name: guess_number}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG + f"runs_dir: {tmp_path / 'runs'}\n")
    return file


def test_a_checkpoint_that_is_not_there_is_refused(config: Path, tmp_path: Path) -> None:
    result = penstock("eval", config, "--checkpoint", "nothing", "--runs-dir", tmp_path)
    assert result.exit_code == 1 and "no run named nothing" in result.stderr


def test_so_is_a_run_without_one(config: Path, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "state.json").write_text("{}")
    result = penstock("eval", config, "--checkpoint", "mine", "--runs-dir", tmp_path / "runs")
    assert result.exit_code == 1 and "run mine has no complete checkpoint" in result.stderr


@pytest.mark.parametrize(
    ("words", "message", "exit_code"),
    [
        (["pipeline=train"], "pipeline is train: `penstock train", 2),
        (["data.eval_tasks=0"], "there are no tasks to evaluate", 1),
        (["data.eval_task=0"], "did you mean data.eval_tasks?", 2),
        (["--json", "nowhere/results.json"], "--json: there is no directory nowhere", 1),
    ],
)
def test_so_is_what_could_come_to_nothing(config: Path, words: list[str], message: str, exit_code: int) -> None:
    result = penstock("eval", config, *words)
    assert result.exit_code == exit_code and message in result.stderr
    assert not (config.parent / "runs").exists()


def test_what_a_file_says_of_training_is_passed_over(config: Path) -> None:
    config.write_text(config.read_text() + "run_id: trained\npipeline: train\nmodel: {warm_start: {steps: 9}}\n")
    resolved = load_config(config, AS_IT_IS)
    assert (resolved.pipeline, resolved.run_id, resolved.model.warm_start.steps) == ("eval", None, 0)


def test_it_is_said_that_nobody_trained_the_policy(config: Path) -> None:
    run_dir = config.parent / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "pool").write_text("a file where a folder belongs")
    result = penstock("eval", config, "run_id=mine", "observe.progress=false")
    assert result.exit_code == 1 and "pool" in result.stderr
    assert "note: model.path is tiny, an untrained policy that acts at random" in result.stderr
