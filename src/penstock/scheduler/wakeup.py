"""Waiting inside the scheduler: one signal per loop, one clock of the last change for all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from penstock.deadline import report, stalled

REPORTED_AFTER = 0.25
"""Of the time after which nothing more is hoped for."""


class Signal(asyncio.Event):
    """Wakes the one loop that waits for it."""

    def __init__(self, waiter: str, resource: str, holder: str) -> None:
        super().__init__()
        self.waiter, self.resource, self.holder = waiter, resource, holder


class Progress:
    """Bounds every wait: a report once nothing at all has changed for a quarter of `stall_s`, and `Stalled` in the end.
    One timer watches over all."""

    def __init__(self, *, now: Callable[[], float], stall_s: float) -> None:
        self._now, self._stall_s = now, stall_s
        self._changed_at = now()
        self._signals: list[Signal] = []
        self._waiting: list[Signal] = []
        self._watch: asyncio.TimerHandle | None = None
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
        if self.hopeless is None and not signal.is_set():
            self._waiting.append(signal)
            if self._watch is None:
                self._look()
            try:
                await _wait_for(signal, None if until == math.inf else until - self._now())
            finally:
                self._waiting.remove(signal)
        if self.hopeless is not None:
            raise self.hopeless
        if self._left_s <= 0:
            raise stalled(waiter=signal.waiter, resource=signal.resource, holder=signal.holder, seconds=self._stall_s)

    @property
    def _left_s(self) -> float:
        """Seconds until all who wait have waited too long."""
        return self._changed_at + self._stall_s - self._now()

    def _look(self) -> None:
        """Wake everybody if nothing has changed for too long; else look again when that may be so, or is worth a
        report."""
        self._watch = None
        if not self._waiting:
            return
        if self._left_s <= 0:
            for signal in self._signals:
                signal.set()
            return
        quiet_s, worth_telling_s = self._now() - self._changed_at, REPORTED_AFTER * self._stall_s
        wait_s = worth_telling_s - quiet_s
        if quiet_s > 0.99 * worth_telling_s:  # timers of a late clock are rounded
            self._tell(quiet_s)
            wait_s = self._left_s
        self._watch = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _tell(self, quiet_s: float) -> None:
        for signal in self._waiting:
            report(waiter=signal.waiter, resource=signal.resource, holder=signal.holder, seconds=quiet_s)


async def _wait_for(signal: Signal, seconds: float | None) -> None:
    """Until `signal` is set, or `seconds` have passed."""
    if seconds is None:
        await signal.wait()
        return
    try:
        async with asyncio.timeout(seconds):
            await signal.wait()
    except TimeoutError:
        return
