"""An asyncio event loop with a virtual clock: when nothing is ready, the clock jumps to the next timer.

Code that uses only `asyncio` waits and `loop.time()` runs on it unchanged, deterministically, and as fast as the CPU
allows.
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
"""Turns of the loop between two polls of real file descriptors. One system call per turn would be most of its cost."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that advances the loop's clock by `timeout` instead of sleeping."""

    now = 0.0
    moved: Callable[[float], None]
    """Called with the new time after every jump."""
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
    """An event loop on a virtual clock that starts at time 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._jumping.moved = self._keep_resolution

    def _keep_resolution(self, now: float) -> None:
        """Set asyncio's clock resolution to at least two floating-point steps at `now`. asyncio runs timers up to one
        resolution (a nanosecond) ahead of time. At large times a nanosecond is lost in rounding; a due timer would
        never run and time would stand still."""
        self._clock_resolution = max(1e-9, 2 * math.ulp(now))

    def time(self) -> float:
        return self._jumping.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` like `asyncio.run`, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
