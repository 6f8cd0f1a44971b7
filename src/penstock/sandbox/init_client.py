"""The creator's side of a box: requests to its init, and what the init answers, which is not trusted."""

from __future__ import annotations

import errno
import marshal
import os
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any, Literal, Protocol

import psutil

from penstock.sandbox.box import BoxEnded
from penstock.sandbox.init import DONE, ENDED, STARTED
from penstock.sandbox.limits import Limits, Outcome

SIGNALLED = 128
"""Exit status of a program ended by a signal, as a shell reports it: this number plus the signal's number."""
KILLED = SIGNALLED + signal.SIGKILL
GRACE_S = 5.0
"""Time for the init to end a program that took too long, and to answer. After that the whole box is killed."""
FILE_S = 30.0
"""Time limit to write or read one file."""
CLOSE_S = 5.0
"""Time limit for a box to end, before its processes are killed from outside."""
MOST_READ_BYTES = 64 << 20
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}


class Connection:
    """One request to an init, and its answer."""

    def __init__(
        self, control: socket.socket, request: dict[str, Any], deadline: float, fds: Sequence[int] = ()
    ) -> None:
        """Raises `BoxEnded`, and TimeoutError if the init does not take the request."""
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(control, [b"+"], [theirs.fileno(), *fds])
            content = marshal.dumps(request)
            self._socket.settimeout(_seconds_to(deadline))
            with suppress(BrokenPipeError, ConnectionResetError):  # the answer says it: there is none
                self._socket.sendall(struct.pack("<I", len(content)) + content)
        except TimeoutError:
            self._socket.close()
            raise
        except OSError as error:
            self._socket.close()
            raise BoxEnded(errno.EPIPE, f"the box has ended: {error.strerror}") from None

    def receive(self, size: int, deadline: float) -> bytes:
        """Return `size` bytes of the answer. Raises `BoxEnded` if the box ends before, and TimeoutError."""
        pieces: list[bytes] = []
        while size:
            self._socket.settimeout(_seconds_to(deadline))
            try:
                piece = self._socket.recv(size)
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise BoxEnded(errno.EPIPE, "the box has ended")
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def is_answered(self, seconds: float | None) -> bool:
        """Wait until there is an answer, or the box has ended."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def kill(self) -> None:
        """Have the program killed that runs for this request. The answer says how it ended."""
        with suppress(OSError):  # an init that reads nothing ends with the box
            self._socket.send(b"-", socket.MSG_DONTWAIT)

    def close(self) -> None:
        """End the request. A program that still runs for it is killed."""
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _seconds_to(deadline: float) -> float:
    return max(deadline - time.monotonic(), 1e-3)


class StartedProgram:
    """A long-lived program in a box."""

    def __init__(self, connection: Connection, deadline: float) -> None:
        """Raises `BoxEnded` or TimeoutError if the init does not start it."""
        self._connection = connection
        (self.pid,) = STARTED.unpack(connection.receive(STARTED.size, deadline))
        self._returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit status; None while the program runs."""
        with self._lock:
            if self._returncode is None and self._connection.is_answered(0):
                self._returncode = self._read()
            return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises TimeoutError."""
        with self._lock:
            if self._returncode is None:
                if not self._connection.is_answered(timeout):
                    raise TimeoutError(f"the program still runs after {timeout} s")
                self._returncode = self._read()
            return self._returncode

    def kill(self) -> None:
        """Kill the program and everything that it started."""
        self._connection.kill()

    def _read(self) -> int:
        try:
            returncode, *_ = ENDED.unpack(self._connection.receive(ENDED.size, time.monotonic() + GRACE_S))
        except (BoxEnded, TimeoutError):
            return KILLED
        finally:
            self._connection.close()
        return shell_status(returncode)


class Closable(Protocol):
    def close(self) -> None: ...


class InitBox:
    """A box behind the socket of its init."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, work: str, limits: Limits, held: Closable | None
    ) -> None:
        """`process`: the process outside the box that ends with it. `control`: the socket of the init. `held`:
        closed after the end."""
        control.settimeout(GRACE_S)
        self._creator = os.getpid()
        self._process, self._control, self._work, self._limits, self._held = process, control, work, limits, held
        self._lock = threading.Lock()

    def write(self, name: str, text: str | bytes) -> None:
        content = text.encode() if isinstance(text, str) else bytes(text)
        self._file_request({"name": _checked(name), "content": content}, most=0)

    def read(self, name: str) -> bytes:
        return self._file_request({"name": _checked(name), "most": MOST_READ_BYTES}, most=MOST_READ_BYTES)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        its = limits or self._limits
        started = time.monotonic()
        request = self._request(argv, env, its) | {"stdin": stdin.encode(errors="replace"), "is_waited_for": True}
        try:
            with Connection(self._control, request, started + its.wall_s + GRACE_S) as connection:
                return _outcome(connection, its, started)
        except TimeoutError:
            self._kill()
            return _broken("wall_s", started)
        except BoxEnded:
            if self._control.fileno() < 0:
                raise
            return _broken(None, started)

    def start(self, argv: Sequence[str], *, pass_fds: Sequence[int] = ()) -> StartedProgram:
        request = self._request(argv, None, self._limits, fds=pass_fds)
        request["limits"] = {**request["limits"], "wall_s": None, "cpu_s": None}
        deadline = time.monotonic() + GRACE_S
        return StartedProgram(Connection(self._control, request, deadline, pass_fds), deadline)

    def close(self) -> None:
        with self._lock:
            self._control.close()
            try:
                self._process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                self._kill()
                self._process.wait()
            if self._held is not None:
                self._held.close()
                self._held = None

    def __enter__(self) -> InitBox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """Give everything back, also if a cancelled opening dropped the box."""
        if os.getpid() == self._creator:  # not in a forked process
            self.close()

    def _request(
        self, argv: Sequence[str], env: Mapping[str, str] | None, limits: Limits, *, fds: Sequence[int] = ()
    ) -> dict[str, Any]:
        base = ENVIRONMENT | {"HOME": self._work, "TMPDIR": self._work}
        return {
            "argv": [*argv],
            "env": base | dict(env or {}),
            "stdin": b"",
            "is_waited_for": False,
            "fds": [*fds],
            "limits": {name: getattr(limits, name) for name in Limits.__slots__},
        }

    def _file_request(self, request: dict[str, Any], *, most: int) -> bytes:
        deadline = time.monotonic() + FILE_S
        with Connection(self._control, request, deadline) as connection:
            error, size = DONE.unpack(connection.receive(DONE.size, deadline))
            if error:
                raise OSError(error, os.strerror(error), request["name"])
            if size > most:
                raise BoxEnded(errno.EPROTO, f"the box answers with {size} bytes")
            return connection.receive(size, deadline)

    def _kill(self) -> None:
        """Kill the box from outside: each of its processes, because an init that gets no processor cannot end them."""
        with suppress(psutil.Error):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()
        self._process.kill()


def _outcome(connection: Connection, limits: Limits, started: float) -> Outcome:
    deadline = started + limits.wall_s + GRACE_S
    returncode, cpu_s, is_late, *sizes = ENDED.unpack(connection.receive(ENDED.size, deadline))
    if max(sizes) > limits.output_bytes:
        raise BoxEnded(errno.EPROTO, f"the box answers with {max(sizes)} bytes")
    stdout, stderr = (connection.receive(size, deadline).decode(errors="replace") for size in sizes)
    status = shell_status(returncode)
    is_cpu = status == KILLED and cpu_s > limits.cpu_s - 0.5  # the kernel checks at intervals
    return Outcome(
        returncode=status,
        stdout=stdout,
        stderr=stderr,
        wall_s=time.monotonic() - started,
        cpu_s=cpu_s,
        exceeded="wall_s" if is_late else "cpu_s" if is_cpu else None,
    )


def _broken(exceeded: Literal["wall_s"] | None, started: float) -> Outcome:
    """Return the outcome of a program that ended together with its box."""
    wall_s = time.monotonic() - started
    return Outcome(returncode=KILLED, stdout="", stderr="", wall_s=wall_s, cpu_s=0.0, exceeded=exceeded)


def shell_status(returncode: int) -> int:
    """Return the exit status as a shell reports it. `returncode`: negative if a signal ended the program."""
    return SIGNALLED - returncode if returncode < 0 else returncode


def _checked(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"{name!r} is not a path below the work directory")
    return str(path)
