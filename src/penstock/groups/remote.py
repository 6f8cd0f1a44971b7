"""The backend for ranks in other processes. A `Connection` to each rank carries the messages."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from penstock.groups.backend import Backend, Call, Handle
from penstock.groups.errors import CallRefused, Raised, WorkerLost
from penstock.groups.rank_worker import Make
from penstock.groups.role import Rank, Role
from penstock.groups.wire import Packed, pack, unpack
from penstock.runtime.frames import Frames

START_S = 120.0
"""Limit for processes to start, import the classes of their workers, and build the workers."""


class Connection(Protocol):
    """A connection to the process of one rank, which answers each message in order. One thread sends, another thread
    receives."""

    def send(self, frames: Frames) -> None:
        """Send a message. The caller may change its buffers afterwards. Raises OSError when the process is gone."""

    def receive(self) -> Frames:
        """Wait for the next message. Raises EOFError or OSError when the process is gone, or after `leave`."""

    def leave(self) -> None:
        """Tell the process to end."""

    def ended(self) -> str:
        """End the process, and return how it ended. Called after `receive` has raised."""


class RemoteBackend(Backend):
    """Workers in other processes. Arguments and results are copied. Classes and functions travel by name, and the ranks
    import them."""

    def __init__(self, roles: Mapping[str, Role], connections: Sequence[Connection], *, start_s: float) -> None:
        """`connections`: by rank; the group closes them. `start_s`: limit for building all workers."""
        super().__init__(roles, len(connections))
        self._lock = threading.Lock()
        self._ranks = [_RemoteRank(rank, connection) for rank, connection in enumerate(connections)]
        try:
            ranks = enumerate(self._ranks)
            handles = [rank.send(pack(Make(self.roles, Rank(i, self.size))), self._init_handle(i)) for i, rank in ranks]
            self._await_workers(handles, start_s)
        except BaseException:
            self.close()
            raise

    def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
        requests = _pack(calls)
        with self._lock:  # so that every worker sees all calls in the same order
            for rank, call in calls.items():
                if (end := self._ranks[rank].end) is not None:
                    raise WorkerLost(rank=rank, role=call.role, method=call.method, end=end)
            return {
                rank: self._ranks[rank].send(requests[rank], Handle(rank, call.role, call.method))
                for rank, call in calls.items()
            }

    def close(self) -> None:
        for rank in self._ranks:
            rank.leave()
        for rank in self._ranks:
            rank.join()


class _RemoteRank:
    """One rank, and the calls that it has not answered yet."""

    def __init__(self, rank: int, connection: Connection) -> None:
        self._connection = connection
        self.end: str | None = None
        """How the rank's process ended, once it has."""
        self._is_leaving = False
        self._lock = threading.Lock()
        self._pending: deque[Handle] = deque()
        self._reader = threading.Thread(target=self._read, name=f"group-rank-{rank}", daemon=True)
        self._reader.start()

    def send(self, request: Frames, handle: Handle) -> Handle:
        with self._lock:
            if self.end is not None:
                handle.lose(self.end)
                return handle
            self._pending.append(handle)
        with suppress(OSError):  # the process has ended: the reader finds out how
            self._connection.send(request)
        return handle

    def leave(self) -> None:
        self._is_leaving = True
        self._connection.leave()

    def join(self) -> None:
        """Wait until the process has ended."""
        self._reader.join()

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                answer = self._connection.receive()
                with self._lock:
                    handle = self._pending.popleft() if self._pending else None
                if handle is None:
                    raise ConnectionError("the process sent an answer without a request")
                try:
                    handle.settle(unpack(answer))
                except Exception as error:  # the answer's own unpickling may raise anything
                    handle.settle(Raised.of(error))
        end = self._connection.ended()
        with self._lock:
            self.end = "the group was closed" if self._is_leaving else end
            pending, self._pending = self._pending, deque()
        for handle in pending:
            handle.lose(self.end)


def _pack(calls: Mapping[int, Call]) -> dict[int, Frames]:
    """Return the pickled calls by rank. Pickle a value once even if several ranks get it."""
    packed: dict[int, Packed] = {}
    requests = {}
    for rank, call in calls.items():
        for name, value in call.arguments.items():
            if id(value) in packed:
                continue
            try:
                packed[id(value)] = Packed(pack(value))
            except Exception as error:  # the value's own pickling may raise anything
                raise CallRefused(f"{call.role}.{call.method}: {name} cannot be sent to a process: {error}") from error
        arguments = {name: packed[id(value)] for name, value in call.arguments.items()}
        requests[rank] = pack(replace(call, arguments=arguments))
    return requests
