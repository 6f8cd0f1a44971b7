"""A run on servers that it did not start. One of them is killed while it generates, and what represents it too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_deaths import LIMIT_S
from test_training_run import RECIPE, SHORT, command, had_their_groups, leftovers, lines, only_run

from penstock.config import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_tiny_model(directory, TinyModelConfig(), max_context=64)
    load_policy(directory, weights=False, seed=0).save_pretrained(directory)
    return directory


@pytest.fixture
def servers(model: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """By URL."""
    words = [sys.executable, "-m", "penstock.cli.main", "serve", "--model", str(model), "--port", "0"]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    yield {process.stdout.readline().split(" at ")[1].split()[0]: process for process in started if process.stdout}
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_server_costs_no_episode(
    model: Path, servers: dict[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    overrides = [*SHORT, f"model.path={model}", f"trainer.steps={STEPS}"]
    overrides += [f"rollout.urls=[{','.join(servers)}]"]
    runs = tmp_path / "runs"
    with subprocess.Popen(
        command(RECIPE, runs, *overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        give_up = time.monotonic() + LIMIT_S
        while not any(len(lines(path)) >= 5 for path in runs.glob("*/metrics.jsonl")):
            assert run.poll() is None and time.monotonic() < give_up, run.communicate(timeout=10)[0]
            time.sleep(0.1)
        url, victim = next(iter(servers.items()))
        victim.send_signal(signal.SIGKILL)
        state = json.loads((only_run(runs) / "state.json").read_text())
        os.kill(state["processes"]["rollout-0"]["pid"], signal.SIGKILL)
        output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    run_dir = only_run(runs)
    summary = json.loads((run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    assert (summary["status"], summary["steps"], ledger["failed"]) == ("completed", STEPS, 0)
    assert had_their_groups(STEPS, ledger)
    assert summary["kl_engine_trainer"] < 1e-4
    lost = [event["url"] for event in lines(run_dir / "events.jsonl") if event["event"] == "server_lost"]
    assert set(lost) == {url}
    processes = [event for event in lines(run_dir / "events.jsonl") if event["event"] == "process"]
    exits = [event for event in processes if (event["name"], event["state"]) == ("rollout-0", "exited")]
    assert [event["returncode"] for event in exits] == [-signal.SIGKILL, 0]
    assert leftovers(run_dir) == []
