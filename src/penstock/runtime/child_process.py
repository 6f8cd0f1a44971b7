"""A child process behind a pipe: start it, end it, and report how it ended. `main` is the program of the child.

The child answers requests one at a time, in the order of arrival. The child exits when the pipe closes, so it also
exits when its parent is killed. Its printed output goes to standard error. The parent chooses the class that answers.
That class determines the message format: a parent that cannot trust the answers must not choose pickle.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib import import_module
from typing import Protocol

from penstock.runtime import frames
from penstock.runtime.frames import Frames

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
                [sys.executable, "-m", "penstock.runtime.child_process", str(theirs.fileno()), answerer],
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


class Answerer(Protocol):
    """The object in the child that answers requests."""

    def answer(self, request: Frames) -> Frames:
        """Carry out a request and return the answer. An error of the request is returned as an answer too."""


def main() -> None:
    """Answer the requests of the parent."""
    pipe, (module, _, name) = socket.socket(fileno=int(sys.argv[1])), sys.argv[2].partition(":")
    pipe.set_inheritable(False)  # otherwise programs started by the answerer would keep the pipe open
    sys.stdout = sys.stderr
    requests: queue.Queue[Frames] = queue.Queue()
    threading.Thread(target=_read, args=(pipe, requests), daemon=True).start()
    answerer: Answerer = getattr(import_module(module), name)()
    while True:
        frames.send(pipe, answerer.answer(requests.get()))


def _read(pipe: socket.socket, requests: queue.Queue[Frames]) -> None:
    """Queue requests until the pipe closes. Then the parent is gone, and this process exits."""
    try:
        while True:
            requests.put(frames.receive(pipe))
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
