"""Processes of a real run are killed in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_training_run import RECIPE, SHORT, check_logs, command, leftovers, lines, only_run

from penstock.store.index import PoolIndex

pytestmark = pytest.mark.integration

TWO_OF_EACH = ["env.workers=2", "rollout.servers=2", "scheduler.trigger.min_samples=64"]
SYNCHRONOUS = ["scheduler.mode=synchronous", "scheduler.max_staleness=0"]
LIMIT_S = 400
TRAINER_DIES = [
    ("supervisor", r"trainer-0: exited .*killed by SIGKILL"),
    ("trainer-0", r"restart 1 of trainer-0 \(killed by SIGKILL\)"),
    ("trainer-0", r"starts \(penstock "),
    ("trainer-0", r"goes back to \S+/step_\d+"),
    ("controller", r"rewound: step="),
    ("supervisor", r"ends: the run is completed"),
]
"""Log lines, in order of time."""


def started(runs: Path, *overrides: str) -> subprocess.Popen[str]:
    words = command(RECIPE, runs, *SHORT, "data.eval_tasks=8", *overrides)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(run: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not happened():
        assert run.poll() is None and time.monotonic() < give_up, run.communicate(timeout=10)[0]
        time.sleep(0.02)


def has_steps(runs: Path, number: int) -> bool:
    return any(len(lines(path)) >= number for path in runs.glob("*/metrics.jsonl"))


def trained_tasks(run_dir: Path) -> list[list[str]]:
    """Of every optimizer step of the surviving lineage, in order."""
    index = PoolIndex(run_dir / "pool")
    steps = defaultdict(list)
    for record in index.records():
        if record.trained_in is not None:
            steps[record.trained_in].append(record.task_id)
    index.close()
    return [sorted(steps[version]) for version in sorted(steps)]


def ended_well(run_dir: Path, num_steps: int) -> dict[str, Any]:
    """The summary, after a look at the books."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", num_steps), summary
    trained = trained_tasks(run_dir)
    assert [len(tasks) for tasks in trained] == [16] * num_steps, "as many groups as steps took, each of them once"
    assert len({task for tasks in trained for task in tasks}) == 16 * num_steps
    ledger = dict(summary["ledger"])
    assert ledger.pop("admitted") == sum(ledger.values())
    assert leftovers(run_dir) == []
    return summary


@pytest.mark.long
def test_every_process_may_die(tmp_path: Path) -> None:
    """One after the other, the next one when the run has gone on after the last."""
    pytest.importorskip("tensorboardX")
    tracked = "observe.trackers=[tensorboard]"
    with started(tmp_path, *TWO_OF_EACH, "trainer.steps=20", "trainer.checkpoint_every=4", tracked) as run:
        for number, victim in enumerate(("env-0", "rollout-1", "trainer-0", "controller"), start=1):
            wait_until(run, lambda number=number: has_steps(tmp_path, 3 * number))  # type: ignore[misc]
            run_dir = only_run(tmp_path)
            state = json.loads((run_dir / "state.json").read_text())
            os.kill(state["processes"][victim]["pid"], signal.SIGKILL)
        output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    summary = ended_well(run_dir, 20)
    assert summary["policy_version"] > 20, "numbers of lost versions are not used again"
    events = lines(run_dir / "events.jsonl")
    exits = [e["name"] for e in events if e.get("state") == "exited" and e["reason"] == "killed by SIGKILL"]
    assert exits == ["env-0", "rollout-1", "trainer-0", "controller"]
    assert {event["event"] for event in events} >= {"rewound", "adopted", "server_back"}
    check_logs(run_dir, TRAINER_DIES)
    tracker = json.loads((run_dir / "trackers" / "tensorboard.json").read_text())
    assert tracker["metrics"] == (run_dir / "metrics.jsonl").stat().st_size, "the tracker has every point"
    assert tracker["x"] == summary["policy_version"]


@pytest.mark.long
def test_a_resumed_run_trains_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    overrides = [*SYNCHRONOUS, "trainer.steps=8", "trainer.checkpoint_every=3"]
    with started(tmp_path / "undisturbed", *overrides) as run:
        run.communicate(timeout=LIMIT_S)
    with started(tmp_path / "killed", *overrides) as run:
        wait_until(run, lambda: has_steps(tmp_path / "killed", 5))
        run.kill()
        run.communicate()
    run_dir = only_run(tmp_path / "killed")
    wait_for_nothing(run_dir)
    words = [sys.executable, "-m", "penstock.cli.main", "resume", str(run_dir)]
    resumed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    ended_well(run_dir, 8)
    assert trained_tasks(run_dir) == trained_tasks(only_run(tmp_path / "undisturbed"))


def wait_for_nothing(run_dir: Path) -> None:
    give_up = time.monotonic() + 60
    while found := leftovers(run_dir):
        assert time.monotonic() < give_up, found
        time.sleep(0.1)
