"""A test session leaves no process and no temporary file, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
END_S = 180.0
WORKERS = ["-n", "2"]
SESSION = """
import os, signal, subprocess, sys, tempfile, time
from pathlib import Path
import pytest

def sleepers():
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    code += "env={}, start_new_session=True); time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

@pytest.fixture
def half_way():
    process = sleepers()
    Path(os.environ["NOTES"], str(process.pid)).touch()
    while not (grandchildren := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
        time.sleep(0.01)
    Path(os.environ["NOTES"], grandchildren[0]).touch()
    Path(tempfile.mkdtemp(), "file").touch()
    Path(os.environ["NOTES"], "directory.new").write_text(tempfile.gettempdir())
    Path(os.environ["NOTES"], "directory.new").rename(Path(os.environ["NOTES"], "directory"))
    raise RuntimeError("failed half-way")

def test_that_leaves_processes(half_way): ...

def test_that_waits():
    waits = Path(os.environ["NOTES"], "waits")
    if os.environ["END"] != "none" and not waits.exists():
        waits.with_suffix(".new").write_text(str(os.getpid()))
        waits.with_suffix(".new").rename(waits)
        time.sleep(600)
"""


INI = """
[pytest]
markers =
    integration
    cuda
asyncio_default_fixture_loop_scope = function
"""


def started(directory: Path, end: str, options: list[str]) -> subprocess.Popen[bytes]:
    """Start a session of two tests that has the project's `conftest.py` and leaves processes."""
    (directory / "tests").mkdir()
    (directory / "tests" / "test_session.py").write_text(SESSION)
    (directory / "pytest.ini").write_text(INI)
    (directory / "notes").mkdir()
    path = os.pathsep.join([str(HERE), *(path for path in sys.path if path)])
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", *options, "tests"],
        cwd=directory,
        env={**os.environ, "NOTES": str(directory / "notes"), "END": end, "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + END_S
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Tell a process from one that has ended and that its new parent, perhaps this process, has not collected."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.integration
@pytest.mark.parametrize(
    ("end", "options"),
    [
        pytest.param("none", [], id="ends"),
        pytest.param("SIGKILL", [], id="killed", marks=pytest.mark.long),
        pytest.param("SIGKILL", WORKERS, id="killed with workers", marks=pytest.mark.long),
        pytest.param("SIGINT", WORKERS, id="interrupted", marks=pytest.mark.long),
        pytest.param("SIGKILL of a worker", WORKERS, id="worker killed", marks=pytest.mark.long),
    ],
)
def test_a_session_leaves_nothing(tmp_path: Path, end: str, options: list[str]) -> None:
    session, notes = started(tmp_path, end, options), tmp_path / "notes"
    try:
        if end != "none":
            wait_until((notes / "waits").exists)
            wait_until((notes / "directory").exists)
            own, worker = session.pid, int((notes / "waits").read_text())
            os.kill(worker if "worker" in end else own, signal.Signals[end.split()[0]])
        session.wait(END_S)
    finally:
        session.kill()
        session.wait()
    pids = [int(path.name) for path in notes.iterdir() if path.name.isdigit()]
    directory = Path((notes / "directory").read_text())
    assert len(pids) == 2
    wait_until(lambda: not any(map(lives, pids)) and not directory.exists())
