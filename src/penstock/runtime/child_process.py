"""A child process behind a pipe: start it, end it, and report how it ended.

The child answers requests one at a time, in the order of arrival. The child exits when the pipe closes, so it also
exits when its parent is killed. Its printed output goes to standard error. The parent chooses the class that answers.
That class determines the message format: a parent that cannot trust the answers must not choose pickle.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

END_S = 10.0
"""Time limit for a process to exit after it was killed or its pipe was closed."""


class ChildProcess:
    """One child process and the parent's end of its pipe."""

    def __init__(self, answerer: str) -> None:
        """Start the child. `answerer` names its `Answerer` as `package.module:Class`. The child gets this process's
        import path."""
        self.pipe, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.runtime.child_main", str(theirs.fileno()), answerer],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and every process in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self) -> str:
        """Wait until the process has ended. Return how it ended, for example `exit 3` or `SIGKILL`.

        A process that does not end within `END_S` is killed."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit {code}"
