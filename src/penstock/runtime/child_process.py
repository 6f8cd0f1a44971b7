"""A child process behind a pipe: start it, end it, and report how it ended. `main` is the program of the child.

The child answers requests one at a time, in the order of arrival. The child exits when the pipe closes, so it also
exits when its parent is killed. Its printed output goes to standard error. The parent chooses the class that answers.
That class determines the message format: a parent that cannot trust the answers must not choose pickle.

A child may run in a sandbox. Then it has no environment variables of the parent, and its printed output is lost.
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
from penstock.runtime.lasting_imports import lasting_imports
from penstock.sandbox import Box, python

END_S = 10.0
"""Time limit for a process to exit after it was killed or its pipe was closed."""
SIGNALLED = 128
"""Exit status of a program in a sandbox that a signal ended: this number plus the signal's number."""
NAMES = {each.value: each.name for each in signal.Signals}
"""Names of signals. Most realtime signals have none."""

IN_BOX = f"""
import os, sys
os.chdir("/")
os.environ.update(dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
sys.path[:] = filter(os.path.exists, sys.argv.pop(1).split({os.pathsep!r}))
from penstock.runtime.child_process import main
main()
"""
"""Program of a child in a sandbox. Directories of the import path that the sandbox lacks are left out, so that nothing
written there later is imported. For the same reason the child does not work in the box's work directory."""


class ChildProcess:
    """One child process and the parent's end of its pipe."""

    def __init__(self, answerer: str, *, box: Box | None = None) -> None:
        """Start the child. `answerer` names its `Answerer` as `package.module:Class`. The child gets this process's
        import path. `box`: the sandbox of the child, which ends with it."""
        self.pipe, theirs = socket.socketpair()
        with theirs:
            pipe, paths = theirs.fileno(), os.pathsep.join(path for path in sys.path if path)
            self._process: _Process | _BoxedProcess
            if box is None:
                self._process = _Process(pipe, answerer, paths)
            else:
                self._process = _BoxedProcess(pipe, answerer, paths, box)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and every process in its process group, or in its sandbox."""
        self._process.kill()

    def wait(self) -> str:
        """Wait until the process has ended. Return how it ended, for example `exit 3`, `SIGKILL` or `signal 35`.

        A process that does not end within `END_S` is killed."""
        code = self._process.wait()
        return f"exit {code}" if code >= 0 else NAMES.get(-code, f"signal {-code}")


class _Process:
    """A child beside its parent, in a session of its own."""

    def __init__(self, pipe: int, answerer: str, paths: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "penstock.runtime.child_process", str(pipe), answerer],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=[pipe],
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
        self.pid, self.poll = self._process.pid, self._process.poll

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()


class _BoxedProcess:
    """A child in a sandbox of its own. Its process id is the one inside."""

    def __init__(self, pipe: int, answerer: str, paths: str, box: Box) -> None:
        self._box = box
        try:
            self._program = box.start(python("-c", IN_BOX, paths, str(pipe), answerer), pass_fds=[pipe])
        except BaseException:
            box.close()
            raise
        self.pid, self.poll, self.kill = self._program.pid, self._program.poll, self._program.kill

    def wait(self) -> int:
        """Wait for the end, and close the sandbox."""
        try:
            status = self._program.wait(END_S)
        except TimeoutError:
            status = SIGNALLED + signal.SIGKILL
        finally:
            self._box.close()
        return SIGNALLED - status if status > SIGNALLED else status


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
    with lasting_imports():
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
