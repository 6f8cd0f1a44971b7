"""`kill -9` of the supervisor leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stand_in_run import HERE, Run

from penstock.supervisor import procfs

pytestmark = pytest.mark.integration
PATIENCE_S = 20.0


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> float:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "waited in vain"
        time.sleep(0.01)
    return time.monotonic() - started


def start(base: Path, *words: str) -> tuple[subprocess.Popen[bytes], Run]:
    return subprocess.Popen([sys.executable, str(HERE / "stand_in_run.py"), str(base), *words]), Run(base)


def state_of(run: Run) -> dict[str, object]:
    path = run.run_dir / "state.json"
    return json.loads(path.read_text()) if path.exists() else {"status": "none"}


def test_kill_9_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    supervisor, run = start(tmp_path, "controller=stubborn", "rollout-0=steady", "env-0=breeds")
    until(lambda: state_of(run)["status"] == "running")
    assert len(run.living()) == 5
    os.kill(state_of(run)["processes"]["rollout-0"]["pid"], signal.SIGSTOP)
    supervisor.kill()
    supervisor.wait()
    assert until(lambda: not run.living() and not run.runtime_dir.exists(), seconds=5.0) < 5.0
    until(lambda: state_of(run)["status"] == "failed")
    assert state_of(run)["error"] == "the supervisor was killed"
    until(lambda: (run.run_dir / "summary.json").exists())


def test_kill_9_while_starting_leaves_nothing(tmp_path: Path) -> None:
    supervisor, run = start(tmp_path, "controller=never_ready")
    until(run.living)
    supervisor.kill()
    supervisor.wait()
    until(lambda: not run.living() and not run.runtime_dir.exists(), seconds=5.0)


def test_without_a_janitor_the_children_end_themselves(tmp_path: Path) -> None:
    supervisor, run = start(tmp_path, "controller=stubborn", "env-0=steady")
    until(lambda: state_of(run)["status"] == "running")
    janitors = [s.pid for s in procfs.table() if s.parent == supervisor.pid and not procfs.environment(s.pid)[0]]
    assert len(janitors) == 1
    os.kill(janitors[0], signal.SIGKILL)
    supervisor.kill()
    supervisor.wait()
    until(lambda: not run.living(), seconds=5.0)


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
