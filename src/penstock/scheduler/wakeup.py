"""Waits inside the scheduler: one signal per loop, and one time of the last change for all loops."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from penstock.deadline import report, stalled

Clock = Callable[[], float]
"""Returns seconds since any moment."""
REPORTED_AFTER = 0.25
"""The waits are reported after this share of `stall_s` without any change."""


class Signal(asyncio.Event):
    """An event that wakes the one loop that waits for it."""

    def __init__(self, waiter: str, resource: str, holder: str) -> None:
        super().__init__()
        self.waiter, self.resource, self.holder = waiter, resource, holder


class Progress:
    """Bounds on all waits of the scheduler. One timer watches all waits.

    It reports the waits if no change came for a quarter of `stall_s`. The waits raise `Stalled` after `stall_s`.
    """

    def __init__(self, *, now: Clock, stall_s: float) -> None:
        self._now, self._stall_s = now, stall_s
        self._changed_at = now()
        self._signals: list[Signal] = []
        self._waiting: list[Signal] = []
        self._watch: asyncio.TimerHandle | None = None
        self.hopeless: Exception | None = None
        """Error that ends the run; every wait raises it."""

    def signal(self, waiter: str, *, resource: str, holder: str) -> Signal:
        """Return a new signal. In reports, `waiter` waits for `resource`, held by `holder`."""
        signal = Signal(waiter, resource, holder)
        self._signals.append(signal)
        return signal

    def changed(self, *signals: Signal) -> None:
        """Wake the loops that wait for `signals`, because inputs of their decisions have changed."""
        self._changed_at = self._now()
        for signal in signals:
            signal.set()

    def give_up(self, reason: Exception | None) -> None:
        """Make every waiting loop raise `reason`, unless it is None."""
        if reason is not None:
            self.hopeless = reason
            self.changed(*self._signals)

    async def wait(self, signal: Signal, *, until: float = math.inf) -> None:
        """Wait until `signal` is set, or until the time `until`. Raises `self.hopeless` if it is set, or `Stalled`."""
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
        """Return the seconds until the waits raise `Stalled`, if no change comes."""
        return self._changed_at + self._stall_s - self._now()

    def _look(self) -> None:
        """Wake every loop if the last change is `stall_s` ago. Otherwise set the timer for the report or that time."""
        self._watch = None
        if not self._waiting:
            return
        if self._left_s <= 0:
            for signal in self._signals:
                signal.set()
            return
        quiet_s, report_after_s = self._now() - self._changed_at, REPORTED_AFTER * self._stall_s
        wait_s = report_after_s - quiet_s
        if quiet_s > 0.99 * report_after_s:  # the timer may fire slightly early: clocks are rounded
            for signal in self._waiting:
                report(waiter=signal.waiter, resource=signal.resource, holder=signal.holder, seconds=quiet_s)
            wait_s = self._left_s
        self._watch = asyncio.get_running_loop().call_later(wait_s, self._look)


async def _wait_for(signal: Signal, seconds: float | None) -> None:
    """Wait until `signal` is set, or `seconds` have passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await signal.wait()
