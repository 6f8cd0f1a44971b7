"""Ends what a test session leaves behind, however the session ends.

A session marks its environment and keeps its temporary files in one directory. A watcher process holds the read end
of a pipe; only the session holds the write end. When the pipe closes, the watcher kills every process that carries the
mark in its environment, and its descendants, and removes the directory and the runtime directories of their runs. As a
program (`python -I -S session_guard.py SOURCE MARK DIRECTORY`) this module is the watcher: standard library only.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

NAME = "PENSTOCK_TEST_SESSION"
RUNTIME_DIR = b"PENSTOCK_RUNTIME_DIR="
SOURCE = Path(__file__).resolve().parent.parent / "src"
ROUNDS = 40
END_S = 60.0


class SessionGuard:
    """The session's end of the pipe."""

    def __init__(self) -> None:
        mark, root = secrets.token_hex(8), tempfile.gettempdir()
        self.directory = Path(tempfile.mkdtemp(prefix="t-"))  # short: Ray's sockets lie in it, and a path has 107 bytes
        self._watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(SOURCE), mark, str(self.directory)],
            stdin=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
        os.environ |= {NAME: mark, "TMPDIR": str(self.directory)}
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", root)  # pytest keeps its own directories of the latest sessions
        tempfile.tempdir = None

    def close(self) -> None:
        """Wait until the watcher has ended what is left."""
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait(END_S)


def main() -> None:
    """Wait for the end of the session, then end what carries its mark."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    source, mark, directory = sys.argv[1:]
    sys.path.insert(0, source)
    from penstock.supervisor import procfs

    sys.stdin.read()
    runtime_dirs: set[str] = set()

    def belongs(stat: procfs.Stat) -> bool:
        entries = procfs.environment(stat.pid)
        if f"{NAME}={mark}".encode() not in entries:
            return False
        runtime_dirs.update(os.fsdecode(e.removeprefix(RUNTIME_DIR)) for e in entries if e.startswith(RUNTIME_DIR))
        return True

    procfs.kill_family(belongs, spare={os.getpid()}, rounds=ROUNDS)
    for path in [directory, *runtime_dirs]:
        shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
