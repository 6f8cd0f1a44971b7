"""Waiting inside the scheduler: one signal per loop, one clock of the last change for all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from penstock.deadline import Stalled


class Signal(asyncio.Event):
    """Wakes the one loop that waits for it."""

    def __init__(self, waiter: str, resource: str, holder: str) -> None:
        super().__init__()
        self.waiter, self.resource, self.holder = waiter, resource, holder


class Progress:
    """Bounds every wait: `Stalled` once nothing at all has changed for `stall_s`."""

    def __init__(self, *, now: Callable[[], float], stall_s: float) -> None:
        self._now, self._stall_s = now, stall_s
        self._changed_at = now()
        self._signals: list[Signal] = []
        self.hopeless: Exception | None = None
        """Why the run cannot go on; raised by whoever waits."""

    def signal(self, waiter: str, *, resource: str, holder: str) -> Signal:
        """A new signal: `waiter` waits for `resource`, held by `holder`."""
        signal = Signal(waiter, resource, holder)
        self._signals.append(signal)
        return signal

    def changed(self, *signals: Signal) -> None:
        """Something happened that those who wait for `signals` must look at."""
        self._changed_at = self._now()
        for signal in signals:
            signal.set()

    def give_up(self, reason: Exception) -> None:
        """The run cannot go on: wake everybody."""
        self.hopeless = reason
        self.changed(*self._signals)

    async def wait(self, signal: Signal, *, until: float = math.inf) -> None:
        """Until `signal` is set, or until the time `until`. Raises what makes the run hopeless."""
        while self.hopeless is None and not signal.is_set():
            now = self._now()
            if now >= until:
                return
            stalls_at = self._changed_at + self._stall_s
            if now >= stalls_at:
                raise Stalled(
                    waiter=signal.waiter, resource=signal.resource, holder=signal.holder, seconds=self._stall_s
                )
            try:
                async with asyncio.timeout(min(until, stalls_at) - now):
                    await signal.wait()
            except TimeoutError:
                continue
        if self.hopeless is not None:
            raise self.hopeless
