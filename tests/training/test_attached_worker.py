"""A run that starts no environment worker of its own; others attach, leave, die, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_deaths import LIMIT_S
from test_training_run import EXAMPLES, had_their_groups, leftovers, lines, only_run

pytestmark = [pytest.mark.integration, pytest.mark.long]

SILENT_S = 15
STEPS = 100


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """The example in a folder of its own, with runs beside it."""
    folder = tmp_path / "example"
    shutil.copytree(EXAMPLES / "env_file", folder)
    with (folder / "run.yaml").open("a") as file:
        file.write(f"runs_dir: {tmp_path / 'runs'}\nsupervisor: {{silent_s: {SILENT_S}}}\n")
    return folder


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def start(*words: object) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, words)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(run: subprocess.Popen[str], condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not condition():
        assert run.poll() is None and time.monotonic() < give_up, run.communicate(timeout=10)[0]
        time.sleep(0.1)


def test_workers_attach_leave_and_die(
    example: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    config, script, runs = example / "run.yaml", example / "my_env.py", tmp_path / "runs"
    overrides = [f"trainer.steps={STEPS}", "data.eval_tasks=16", "observe.progress=false"]
    slow_learner = "trainer.learning_rate=1e-6"  # who knows all answers has nothing to train on
    run = start("-m", "penstock.cli.main", "train", config, *overrides, slow_learner)

    def events(kind: str) -> list[dict[str, Any]]:
        return [e for path in runs.glob("*/events.jsonl") for e in lines(path) if e["event"] == kind]

    def num_steps() -> int:
        return sum(len(lines(path)) for path in runs.glob("*/metrics.jsonl"))

    until(run, lambda: events("no_workers"))
    run_dir = only_run(runs)
    command = events("no_workers")[0]["command"]
    assert command == f"python {script} serve --run {run_dir}"

    first = start(script, "serve", "--run", run_dir)
    until(run, lambda: num_steps() >= 2)
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 0 and "attached to run" in output and "left run" in output, output
    until(run, lambda: events("left"))
    assert events("left")[0]["reason"] == "it said goodbye"
    assert len(events("no_workers")) == 2

    second, third = (start(script, "serve", "--config", config) for _ in range(2))
    until(run, lambda: len(events("attached")) == 3)
    num_before = num_steps()
    until(run, lambda: num_steps() >= num_before + 2)
    second.kill()
    until(run, lambda: len(events("left")) == 2)
    assert f"sent no message for {SILENT_S} s" in events("left")[1]["reason"]
    run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0
    output, _ = third.communicate(timeout=60)
    assert third.returncode == 0 and "needs no more episodes" in output, output
    summary = json.loads((run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    assert (summary["status"], summary["steps"], ledger["failed"]) == ("completed", STEPS, 0)
    assert ledger.pop("admitted") == sum(ledger.values()) and had_their_groups(STEPS, ledger)
    assert leftovers(run_dir) == []
    late = start(script, "serve", "--config", config)
    output, _ = late.communicate(timeout=60)
    assert late.returncode == 1 and "is active" in output
