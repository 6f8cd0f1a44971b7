"""Unmodified Atropos environments, programs of their own, train the tiny model; they may come early, die and return."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_deaths import LIMIT_S
from test_training_run import EXAMPLES, command, leftovers, lines, only_run

from penstock.compat.atropos_api import SILENT_S

pytestmark = [pytest.mark.integration, pytest.mark.long]

LETTERS = EXAMPLES / "atropos" / "letters.py"
ECHOES = Path(__file__).parent / "environments" / "echoes.py"
SHORT = ["run_id=null", "env.options.port=0", "trainer.groups_per_step=4", "observe.progress=false"]


@contextmanager
def training(runs: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A run that waits for environments, from the moment that it listens to them."""
    process = subprocess.Popen(
        command("atropos", runs, *SHORT, *overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_until(process, lambda: any(runs.glob("*/atropos.json")))
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def environment(program: Path, run_dir: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of its own that plays for the run."""
    url, model = json.loads((run_dir / "atropos.json").read_text())["url"], str(run_dir / "model")
    words = [
        *("serve", "--env.rollout_server_url", url, "--openai.base_url", f"{url}/v1"),
        *("--env.tokenizer_name", model, "--openai.tokenizer_name", model, *options),
    ]
    with (run_dir / "environment.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, str(program), *words], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until(process: subprocess.Popen[str], condition: Callable[[], bool], *, seconds: float = LIMIT_S) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            raise AssertionError(process.communicate(timeout=10)[0])
        time.sleep(0.1)


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return lines(run_dir / "metrics.jsonl")


def check_completed(run: subprocess.Popen[str], run_dir: Path, *, num_steps: int) -> None:
    """To its end, every group accounted for, every token traced back."""
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == num_steps
    assert summary["reward_last"] is not None and 0 < summary["reward_last"] <= 1
    last = steps(run_dir)[-1]
    assert last["samples_unusable"] == {} and "groups_inexact" not in last
    assert summary["kl_engine_trainer"] is None or summary["kl_engine_trainer"] < 1e-4
    ledger = summary["ledger"]
    assert ledger.pop("admitted") == sum(ledger.values())
    assert ledger["failed"] == 0 and leftovers(run_dir) == []


def test_an_environment_that_was_there_first_trains_dies_and_comes_back(tmp_path: Path) -> None:
    with training(tmp_path, "trainer.steps=8") as run:
        run_dir = only_run(tmp_path)
        with environment(LETTERS, run_dir) as first:
            wait_until(run, lambda: len(steps(run_dir)) >= 2)
            first.kill()
            time.sleep(SILENT_S)  # so long it is taken for alive, and keeps its name
        with environment(LETTERS, run_dir) as second:
            check_completed(run, run_dir, num_steps=8)
            assert second.wait(timeout=30) == 0, "it was told that the run is over"
    assert [each["name"] for each in json.loads((run_dir / "atropos_environments.json").read_text())] == ["env_0"]


def test_conversations_are_traced_back_and_the_worker_may_die(tmp_path: Path) -> None:
    with training(tmp_path, "trainer.steps=6", "env.group_size=4") as run:
        run_dir = only_run(tmp_path)
        with environment(ECHOES, run_dir):
            wait_until(run, lambda: len(steps(run_dir)) >= 2)
            assert steps(run_dir)[-1]["samples_unusable"] == {} and "groups_inexact" not in steps(run_dir)[-1]
            address = (run_dir / "atropos.json").read_bytes()
            os.kill(json.loads((run_dir / "state.json").read_text())["processes"]["env-0"]["pid"], signal.SIGKILL)
            time.sleep(0.1)
        with environment(ECHOES, run_dir):  # a client of atroposlib gives up after three attempts
            run.wait(timeout=LIMIT_S)
    assert run.returncode == 0 and (run_dir / "atropos.json").read_bytes() == address
    last = steps(run_dir)[-1]
    assert last["step"] == 6 and last["ledger"]["failed"] == 0
    assert last["samples_unusable"].keys() <= {"nonfinite_logprob"}, "of what only the dead worker remembered"


def test_an_environment_that_cannot_be_trained_fails_the_run_and_is_named(tmp_path: Path) -> None:
    """It samples at another temperature than the run trains at."""
    with training(tmp_path, "env.temperature=0.5", "trainer.steps=2") as run, environment(LETTERS, only_run(tmp_path)):
        output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 1
    assert "env_0 pushed a group that cannot be trained" in output and "env.temperature 0.5" in output
