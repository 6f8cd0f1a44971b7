"""Rollouts and evaluations with engines that load a checkpoint themselves, and with servers that run already."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_other_policies import penstock, rows
from test_training_run import leftovers, lines, only_run

from penstock.config import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.trainer.checkpoint import STATE

pytestmark = [pytest.mark.integration, pytest.mark.long]

VERSION, CONTEXT = 3, 96
CONFIG = f"""
data: {{source: seeds, eval_tasks: 8}}
env: {{name: guess_number, group_size: 2, max_turns: 2, max_new_tokens: 4}}
model: {{max_context: {CONTEXT}}}
synthesis: {{tasks: 6}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path / "run.yaml"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model with weights, as a run leaves it."""
    model = tmp_path / "checkpoint"
    write_tiny_model(model, TinyModelConfig(num_layers=1, hidden_size=32), max_context=CONTEXT)
    load_policy(model, weights=False, seed=1).save_pretrained(model)
    (model / STATE).write_text(json.dumps({"policy_version": VERSION}))
    return model


@pytest.fixture
def sglang(tmp_path: Path) -> list[str]:
    """Settings for an engine of others, which the run starts."""
    python, stand_in = tmp_path / "python", Path(__file__).parent / "sglang_stand_in.py"
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] || {{ shift 2; set {stand_in} "$@"; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return ["rollout.engine=sglang", f"rollout.python={python}"]


def test_an_engine_loads_the_checkpoint_itself(
    config: Path, checkpoint: Path, sglang: list[str], tmp_path: Path
) -> None:
    words = [*sglang, "--checkpoint", str(checkpoint), "env.temperature=0.001"]
    theirs = penstock("rollout", config, tmp_path / "theirs", *words)
    ours = penstock("rollout", config, tmp_path / "ours", *words[2:])
    assert theirs.returncode == 0 and ours.returncode == 0, theirs.stdout + theirs.stderr + ours.stderr
    run_dir = only_run(tmp_path / "theirs")
    found, own = rows(run_dir), rows(only_run(tmp_path / "ours"))
    assert len(found) == 12 and {(row["policy_version_min"], row["policy_version_max"]) for row in found} == {(3, 3)}
    assert {row["model"] for row in found} == {str(checkpoint)}
    said = [{(row["group"], row["episode"]): row["messages"] for row in each} for each in (found, own)]
    assert said[0] == said[1], "both engines have the weights of the checkpoint"
    assert json.loads((run_dir / "state.json").read_text())["processes"].keys() == {"controller", "rollout-0", "env-0"}
    assert leftovers(run_dir) == []


def test_an_engine_is_evaluated_without_a_trainer(
    config: Path, checkpoint: Path, sglang: list[str], tmp_path: Path
) -> None:
    result = penstock("eval", config, tmp_path / "runs", *sglang, "--checkpoint", str(checkpoint))
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = only_run(tmp_path / "runs")
    assert json.loads((run_dir / "evaluation.json").read_text())["model"] == str(checkpoint)
    assert "trainer-0" not in json.loads((run_dir / "state.json").read_text())["processes"]


@contextmanager
def served(model: Path) -> Iterator[str]:
    """`penstock serve`, by hand."""
    words = ["serve", "--model", str(model), "--port", "0", "--name", "my-model", f"model.max_context={CONTEXT}"]
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split(" at ")[1].split()[0]
        finally:
            server.kill()


@pytest.mark.parametrize("engine", ["penstock", "sglang"])
def test_a_server_that_runs_already_is_used_as_it_is(
    config: Path, checkpoint: Path, tmp_path: Path, engine: str
) -> None:
    with served(checkpoint) as url:
        words = [f"rollout.urls=[{url}]", f"rollout.engine={engine}"]
        played = penstock("rollout", config, tmp_path / "runs", *words)
        scored = penstock("eval", config, tmp_path / "scored", *words)
    assert played.returncode == 0 and scored.returncode == 0, played.stdout + played.stderr + scored.stderr
    run_dir = only_run(tmp_path / "runs")
    found = rows(run_dir)
    assert len(found) == 12 and {row["model"] for row in found} == {"my-model"}
    assert {(row["policy_version_min"], row["policy_version_max"]) for row in found} == {(3, 3)}
    events = lines(run_dir / "events.jsonl")
    (said,) = [event for event in events if event["event"] == "server_model"]
    assert (said["url"], said["model"], said["weights"]) == (url, "my-model", "3")
    evaluation = json.loads((only_run(tmp_path / "scored") / "evaluation.json").read_text())
    assert evaluation["model"] == "my-model"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.urls=[http://127.0.0.1:9]", "--checkpoint"], "rollout.urls name servers, which would not play it"),
        (["policy.name=random", "--checkpoint"], "policy.name is random, which would not play it"),
        (["rollout.engine=vllm"], "model.path tiny has no weights that rollout.engine vllm could load"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    config: Path, checkpoint: Path, tmp_path: Path, words: list[str], message: str
) -> None:
    if words[-1] == "--checkpoint":
        words = [*words, str(checkpoint)]
    for command in ("rollout", "eval"):
        result = penstock(command, config, tmp_path / "runs", *words)
        assert result.returncode in (1, 2) and message in result.stderr, result.stderr
    assert not (tmp_path / "runs").exists()
