"""The backend of processes: the workers of each rank live in a process of their own, behind a socket. It is started
here, or on another machine by somebody who was asked for that (`link`).

Processes end with their socket, and so with whoever called them, however that ended. A process that ends takes its
calls with it, and says so; it is not replaced.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.deadline import Stalled
from penstock.groups.backend import Backend, Call, Gone, Handle, Raised, settle
from penstock.groups.errors import CallRefused, RemoteError, WorkerLost
from penstock.groups.group import Group
from penstock.groups.hosted import SESSION, Make
from penstock.groups.link import Link, Seals, place_of
from penstock.groups.role import Rank, Role
from penstock.groups.wire import Frames, Packed, Wire, pack, unpack

START_S = 120.0
"""For processes to start, import what they are to hold, and build it."""
END_S = 10.0
"""For a process that was told to end to be gone."""


class SpawnedBackend(Backend):
    """Arguments and results are copied. Classes and functions travel by name: they are imported on the far side."""

    def __init__(
        self,
        roles: Mapping[str, Role],
        size: int = 1,
        *,
        elsewhere: Sequence[Link] = (),
        start_s: float = START_S,
    ) -> None:
        """`elsewhere`: connections to processes of the last ranks, started by others; they end with the group.
        `start_s`: for all workers to be built."""
        super().__init__(roles, size)
        for name, role in self.roles.items():
            if role.worker_cls.__module__ == "__main__":
                raise TypeError(
                    f"{name}: {role.worker_cls.__name__} is defined in the script that runs, which its processes "
                    "cannot import: move it into a module"
                )
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._hosts: list[Host] = []
        try:
            for rank, link in enumerate(elsewhere, start=size - len(elsewhere)):
                self._hosts.append(Connected(rank, link))
            for rank in range(size - len(elsewhere)):
                self._hosts.insert(rank, Started(rank))
            self._make(start_s)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the processes that were started here, by rank."""
        return [host.pid for host in self._hosts if isinstance(host, Started)]

    def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
        requests = self._pack(calls)
        with self._lock:  # so that every worker sees all calls in the same order
            for rank in calls:
                self._hosts[rank].raise_if_gone()
            number = next(self._numbers)
            return {rank: self._hosts[rank].send(number, request) for rank, request in requests.items()}

    def close(self) -> None:
        for host in self._hosts:
            host.leave()
        for host in self._hosts:
            host.join()

    def _make(self, start_s: float) -> None:
        number, names = next(self._numbers), "+".join(self.roles)
        handles = [
            host.send(number, pack(Make(self.roles, Rank(rank, self.size)))) for rank, host in enumerate(self._hosts)
        ]
        _, missing = wait(handles, start_s, return_when=FIRST_EXCEPTION)
        for rank, handle in enumerate(handles):
            error = handle.exception() if handle.done() else None
            if isinstance(error, Gone):
                raise WorkerLost(rank=rank, role=names, method="__init__", end=error.end)
            if isinstance(error, Raised):
                raise RemoteError(error, rank=rank, role=names, method="__init__")
        if missing:
            ranks = ", ".join(str(rank) for rank, handle in enumerate(handles) if handle in missing)
            raise Stalled(waiter="the driver", resource=f"workers of {names}", holder=f"ranks {ranks}", seconds=start_s)

    def _pack(self, calls: Mapping[int, Call]) -> dict[int, Frames]:
        """What is the same for several ranks is pickled once."""
        packed: dict[int, Packed] = {}
        requests = {}
        for rank, call in calls.items():
            for name, value in call.arguments.items():
                if id(value) not in packed:
                    packed[id(value)] = _packed(call, name, value)
            arguments = {name: packed[id(value)] for name, value in call.arguments.items()}
            requests[rank] = pack(replace(call, arguments=arguments))
        return requests


class Host(ABC):
    """One process, seen from the driver."""

    def __init__(self, rank: int, wire: Wire) -> None:
        self._rank, self._wire = rank, wire
        self._end: str | None = None
        self._leaving = False
        self._lock = threading.Lock()
        self._pending: dict[int, Handle] = {}
        self._reader = threading.Thread(target=self._read, name=f"group-rank-{rank}", daemon=True)
        self._reader.start()

    def raise_if_gone(self) -> None:
        """Raises `Gone`."""
        if self._end is not None:
            raise Gone(self._rank, self._end)

    def send(self, number: int, request: Frames) -> Handle:
        handle: Handle = Handle()
        with self._lock:
            if self._end is not None:
                settle(handle, error=Gone(self._rank, self._end))
                return handle
            self._pending[number] = handle
        with suppress(OSError):  # it has ended: whoever reads from it finds out how
            self._wire.send(number, request)
        return handle

    def leave(self) -> None:
        """Tell it to end."""
        self._leaving = True
        with suppress(OSError):
            self._wire.link.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait until it has ended, which it is made to if need be."""
        self._reader.join()
        self._wire.link.close()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._take(*self._wire.receive())
        end = self._ended()
        if self._leaving:
            end = "the group was closed"
        with self._lock:
            self._end = end
            pending, self._pending = self._pending, {}
        for handle in pending.values():
            settle(handle, error=Gone(self._rank, end))

    def _take(self, number: int, answer: Frames) -> None:
        with self._lock:
            handle = self._pending.pop(number)
        try:
            is_raised, result = unpack(answer)
        except Exception as error:
            is_raised, result = True, Raised.of(error)
        if is_raised:
            settle(handle, error=result)
        else:
            settle(handle, result)

    @abstractmethod
    def _ended(self) -> str:
        """Nothing more comes from it: see that it ends, and say what is known of how it came to that."""


class Connected(Host):
    """One that somebody else started, on another machine."""

    def __init__(self, rank: int, link: Link) -> None:
        self._place = place_of(link.socket)
        super().__init__(rank, Wire(link.socket, Seals(link.session, "driver")))

    def _ended(self) -> str:
        return f"it has ended, or {self._place} is out of reach"


class Started(Host):
    """One that was started here."""

    def __init__(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_process(theirs, start_new_session=True)
        super().__init__(rank, Wire(ours))

    @property
    def pid(self) -> int:
        return self._process.pid

    def _ended(self) -> str:
        """Wait for the end of the process, and say how it came."""
        try:
            code = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit {code}"


def start_process(link: socket.socket, *, start_new_session: bool, session: bytes = b"") -> subprocess.Popen[bytes]:
    """One that holds what it is told through `link`, of which it has a copy. `session`: of a connection from another
    machine."""
    return subprocess.Popen(
        [sys.executable, "-m", "penstock.groups.hosted", str(link.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[link.fileno()],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            SESSION: session.hex(),
        },
        start_new_session=start_new_session,
    )


class SpawnedGroup(Group):
    """A group of one role, each of its workers in a process of its own."""

    def __init__(self, worker_cls: type, size: int = 1, *, elsewhere: Sequence[Link] = (), **init: Any) -> None:
        """Each worker is built as `worker_cls(rank=Rank(i, size), **init)`; `elsewhere`: see `SpawnedBackend`."""
        roles = {worker_cls.__name__: Role(worker_cls, init)}
        super().__init__(SpawnedBackend(roles, size, elsewhere=elsewhere), worker_cls.__name__)


def _packed(call: Call, name: str, value: Any) -> Packed:
    try:
        return Packed.of(value)
    except Exception as error:  # whatever its own pickling raises
        raise CallRefused(f"{call.role}.{call.method}: {name} cannot be sent to a process: {error}") from error
