"""The interface between a group and the backend that carries its calls to objects, processes or other machines."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.deadline import Stalled
from penstock.groups.errors import Raised, RemoteError, WorkerLost
from penstock.groups.role import Role


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a method on one worker."""

    role: str
    method: str
    arguments: Mapping[str, Any]
    wanted: bool = True
    """Whether the driver needs the result."""

    def carry_out(self, workers: Mapping[str, Any]) -> Any:
        """Call the method on the worker's side. The method is user code and may raise anything."""
        result = getattr(workers[self.role], self.method)(**self.arguments)
        return result if self.wanted else None


class Handle(Future[Any]):
    """The future of a call on one rank: its result, `RemoteError` or `WorkerLost`."""

    def __init__(self, rank: int, role: str, method: str) -> None:
        super().__init__()
        self._names: Any = {"rank": rank, "role": role, "method": method}

    def settle(self, answer: Any) -> None:
        """Set the worker's answer, a result or `Raised`, unless the call was cancelled."""
        with suppress(InvalidStateError):
            if isinstance(answer, Raised):
                self.set_exception(RemoteError(answer, **self._names))
            else:
                self.set_result(answer)

    def lose(self, end: str) -> None:
        """Set that the worker ended before it answered, unless the call was cancelled."""
        with suppress(InvalidStateError):
            self.set_exception(WorkerLost(**self._names, end=end))


class Backend(ABC):
    """Carries calls to `size` workers of each role. All roles of one rank share a process."""

    def __init__(self, roles: Mapping[str, Role], size: int) -> None:
        if size < 1:
            raise ValueError(f"a group has at least one worker, not {size}")
        if not roles:
            raise ValueError("a group of workers has at least one role")
        self.roles, self.size, self.queue = dict(roles), size, CallQueue()

    @abstractmethod
    def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
        """Send the calls, by rank, and return at once. Raises `WorkerLost` or `CallRefused` before anything is sent.

        A value that several calls share is the same object in each, so that it is packed only once. Every worker
        carries out one call at a time, and all workers see the calls in the same order.
        """

    @abstractmethod
    def close(self) -> None:
        """End the workers, even in the middle of a call."""

    def _init_handle(self, rank: int) -> Handle:
        """Return the handle of the request to build the workers of a rank."""
        return Handle(rank, "+".join(self.roles), "__init__")

    def _await_workers(self, handles: Sequence[Handle], seconds: float) -> None:
        """Wait until all workers are built. Raises `RemoteError`, `WorkerLost` or `Stalled`."""
        _, missing = wait(handles, seconds, return_when=FIRST_EXCEPTION)
        for handle in handles:
            if handle.done():
                handle.result()
        if missing:
            ranks = ", ".join(str(rank) for rank, handle in enumerate(handles) if handle in missing)
            resource = f"workers of {'+'.join(self.roles)}"
            raise Stalled(waiter="the driver", resource=resource, holder=f"ranks {ranks}", seconds=seconds)


class CallQueue:
    """Starts calls on the same workers in the order in which they were made, even when a call has to wait for its
    arguments."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()

    def run(self, begin: Callable[[], None], *, waits: bool) -> bool:
        """Run `begin` at once, unless this call `waits` or an earlier call still waits. Otherwise run it in a thread
        when its turn comes. Returns whether it ran at once."""
        with self._lock:
            at_once = not waits and not self._waiting
            if not at_once:
                self._waiting.append(begin)
                if len(self._waiting) == 1:
                    threading.Thread(target=self._run_waiting, name="group-calls", daemon=True).start()
        if at_once:
            begin()
        return at_once

    def _run_waiting(self) -> None:
        is_more = True
        while is_more:
            self._waiting[0]()
            with self._lock:
                self._waiting.popleft()
                is_more = bool(self._waiting)
