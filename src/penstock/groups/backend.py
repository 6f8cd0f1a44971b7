"""The port between a group and what carries its calls: to objects, to processes, to another machine."""

from __future__ import annotations

import threading
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.groups.role import Role

Handle = Future[Any]
"""Of a call on one rank: its result, or `Raised`, or `Gone`."""


@dataclass(frozen=True, slots=True)
class Call:
    """What one worker is to do."""

    role: str
    method: str
    arguments: Mapping[str, Any]
    wanted: bool = True
    """Whether anybody looks at the result."""


class Raised(Exception):
    """A method raised on its worker."""

    def __init__(self, kind: str, message: str, trace: str, error: BaseException | None) -> None:
        super().__init__(kind, message, trace, error)
        self.kind, self.message, self.trace, self.error = kind, message, trace, error

    @classmethod
    def of(cls, error: Exception) -> Raised:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)), error)


class Gone(Exception):
    """The worker of `rank` is no more; `end` says how that came."""

    def __init__(self, rank: int, end: str) -> None:
        super().__init__(rank, end)
        self.rank, self.end = rank, end


class Backend(ABC):
    """`size` workers of each role; all roles of one rank share a process."""

    def __init__(self, roles: Mapping[str, Role], size: int) -> None:
        if size < 1:
            raise ValueError(f"a group has at least one worker, not {size}")
        if not roles:
            raise ValueError("a group of workers has at least one role")
        self.roles, self.size, self.order = dict(roles), size, Order()

    @abstractmethod
    def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
        """Send the calls, by rank, and return at once. Raises `Gone` or `CallRefused` before anything is sent. What
        several calls share is one and the same object, so that it need be packed only once. Every worker carries out
        its calls one at a time, all of them in the same order."""

    @abstractmethod
    def close(self) -> None:
        """End the workers, whatever they are doing."""


class Order:
    """Calls on the same workers begin in the order in which they were made, also when one has to wait for what it is
    given."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._later: deque[Callable[[], None]] = deque()

    def run(self, begin: Callable[[], None], *, waits: bool) -> bool:
        """At once, unless it `waits` or one before it does: then in a thread, when its turn has come. Returns whether
        it has begun."""
        with self._lock:
            at_once = not waits and not self._later
            if not at_once:
                self._later.append(begin)
                if len(self._later) == 1:
                    threading.Thread(target=self._run_later, name="group-calls", daemon=True).start()
        if at_once:
            begin()
        return at_once

    def _run_later(self) -> None:
        is_more = True
        while is_more:
            self._later[0]()
            with self._lock:
                self._later.popleft()
                is_more = bool(self._later)


def carry_out(workers: Mapping[str, Any], call: Call) -> Any:
    """On the worker's side. It is our guest who runs here: raises `Raised`, whatever the method raises."""
    try:
        result = getattr(workers[call.role], call.method)(**call.arguments)
    except Exception as error:
        raise Raised.of(error) from None
    return result if call.wanted else None


def settle(handle: Handle, result: Any = None, error: BaseException | None = None) -> None:
    """Give it its outcome, unless it has one or was given up."""
    with suppress(InvalidStateError):
        if error is not None:
            handle.set_exception(error)
        else:
            handle.set_result(result)
