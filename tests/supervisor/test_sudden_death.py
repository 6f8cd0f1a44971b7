"""`kill -9` of the supervisor leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stand_in_run import HERE, PATIENCE_S, Run, state_of, until

from penstock.observe import jsonl
from penstock.supervisor import procfs

pytestmark = pytest.mark.integration


def start(base: Path, *words: str) -> tuple[subprocess.Popen[bytes], Run]:
    return subprocess.Popen([sys.executable, str(HERE / "stand_in_run.py"), str(base), *words]), Run(base)


def janitor_of(supervisor: subprocess.Popen[bytes]) -> int:
    """Of all its children the one without an environment."""
    (pid,) = [s.pid for s in procfs.table() if s.parent == supervisor.pid and not procfs.environment(s.pid)[0]]
    return pid


def test_kill_9_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    supervisor, run = start(tmp_path, "controller=stubborn", "rollout-0=steady", "env-0=breeds")
    until(lambda: state_of(run)["status"] == "running")
    assert len(run.living()) == 5
    os.kill(state_of(run)["processes"]["rollout-0"]["pid"], signal.SIGSTOP)
    supervisor.kill()
    supervisor.wait()
    until(lambda: not run.living() and not run.runtime_dir.exists(), seconds=5.0)
    until(lambda: state_of(run)["status"] == "failed")
    assert state_of(run)["error"] == "the supervisor was killed"
    until(lambda: (run.run_dir / "summary.json").exists())


def test_what_was_killed_can_be_resumed(tmp_path: Path) -> None:
    words = ["controller=obedient", "rollout-0=steady", "env-0=breeds"]
    supervisor, run = start(tmp_path, *words)
    until(lambda: state_of(run)["status"] == "running")
    supervisor.kill()
    supervisor.wait()
    again, _ = start(tmp_path, *words)
    until(lambda: state_of(run)["lives"] == 2 and state_of(run)["status"] == "running")
    (run.run_dir / "finish").touch()
    assert again.wait(PATIENCE_S) == 0
    state = state_of(run)
    assert (state["status"], state["lives"], state["leftovers"]) == ("completed", 2, [])
    path = [event["to"] for event in jsonl.read(run.run_dir / "events.jsonl") if event["event"] == "state"]
    assert path == ["starting", "running", "failed", "pending", "starting", "running", "stopping", "completed"]
    assert not run.living() and not run.runtime_dir.exists()


@pytest.mark.long
def test_a_resumed_run_waits_for_no_janitor(tmp_path: Path) -> None:
    supervisor, run = start(tmp_path, "controller=obedient", "env-0=stubborn")
    until(lambda: state_of(run)["status"] == "running")
    os.kill(state_of(run)["processes"]["env-0"]["pid"], signal.SIGSTOP)  # a stopped process cannot end itself
    os.kill(janitor_of(supervisor), signal.SIGKILL)
    supervisor.kill()
    supervisor.wait()
    assert run.living() and run.runtime_dir.exists()
    (run.run_dir / "finish").touch()
    again, _ = start(tmp_path, "controller=obedient", "env-0=stubborn")
    assert again.wait(PATIENCE_S) == 0
    assert state_of(run)["status"] == "completed"
    assert not run.living() and not run.runtime_dir.exists()


def test_kill_9_while_starting_leaves_nothing(tmp_path: Path) -> None:
    supervisor, run = start(tmp_path, "controller=never_ready")
    until(run.living)
    supervisor.kill()
    supervisor.wait()
    until(lambda: not run.living() and not run.runtime_dir.exists(), seconds=5.0)


def test_without_a_janitor_the_children_end_themselves(tmp_path: Path) -> None:
    supervisor, run = start(tmp_path, "controller=stubborn", "env-0=steady")
    until(lambda: state_of(run)["status"] == "running")
    os.kill(janitor_of(supervisor), signal.SIGKILL)
    supervisor.kill()
    supervisor.wait()
    until(lambda: not run.living(), seconds=5.0)
    shutil.rmtree(run.runtime_dir)


@pytest.mark.long
def test_two_runs_live_side_by_side(tmp_path: Path) -> None:
    first, run = start(tmp_path / "a", "controller=steady", "env-0=breeds")
    second, other = start(tmp_path / "b", "controller=steady", "env-0=breeds")
    until(lambda: state_of(run)["status"] == state_of(other)["status"] == "running")
    first.send_signal(signal.SIGINT)
    first.wait(PATIENCE_S)
    assert state_of(run)["status"] == "stopped"
    assert run.living() == []
    assert state_of(other)["status"] == "running"
    assert len(other.living()) == 4
    second.send_signal(signal.SIGINT)
    second.wait(PATIENCE_S)
    assert other.living() == []
