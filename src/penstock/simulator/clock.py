"""An asyncio event loop whose time jumps: whenever nothing is ready, the clock moves to the next timer.

Code that uses only `asyncio` waits and `loop.time()` runs on it unchanged, deterministically, as fast as the
CPU allows.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Every task waits and no timer is set: on a real clock this would hang for ever."""


POLL_EVERY = 64
"""Turns of the loop between two looks at the real world: a system call each would be most of the cost of a turn."""


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of sleeping for `timeout`, moves the loop's clock on by it."""

    now = 0.0
    moved: Callable[[float], None]
    """Told of every jump."""
    _turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._turns += 1
        events = super().select(0) if timeout is None or self._turns % POLL_EVERY == 0 else []
        if events or timeout == 0:
            return events
        if timeout is None:
            raise Deadlock("every task waits and no timer is set")
        self.now += timeout
        self.moved(self.now)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.moved = self._keep_resolution

    def _keep_resolution(self, now: float) -> None:
        """asyncio runs timers up to its clock's resolution ahead of time: a nanosecond, which late moments cannot tell
        from nothing. Then a timer that is due would never run, and time stand still."""
        self._clock_resolution = max(1e-9, 2 * math.ulp(now))

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
