"""Deadlines and stall reports: every await that another party can delay uses this module.

`deadline` bounds a wait, and raises `Stalled` when the time is up. `warn_if_stalled` is for waits that may be long for
good reasons: it reports the wait, and the wait continues. A report names the waiter, the resource, its holder and the
time, and shows the stacks of all tasks and threads of the process. It goes to the log, or to the listener of
`reporting_to`. `alongside` and `first` run coroutines beside each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from penstock.stacks import stacks, unwound

logger = logging.getLogger(__name__)

Holder = str | Callable[[], str]
"""Name of the party that holds the awaited resource. A function returns the name at the time of a report."""

QUIET_S = 60.0
"""Seconds after a report before the next report about the same resource and holder. Each report doubles them."""
LONGEST_QUIET_S = 3600.0
"""Most seconds between two such reports."""
PERMIT_S = 600.0
"""A longer wait for a semaphore is reported. The holders of its permits have their own deadlines."""


class Stalled(TimeoutError):
    """`waiter` waited longer than allowed for `resource`, held by `holder`."""

    self_explanatory = True

    def __init__(self, *, waiter: str, resource: str, holder: str, seconds: float) -> None:
        super().__init__(f"{waiter} waited {seconds:g} s for {resource}, held by {holder}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A report: `waiter` has waited `seconds` for `resource`, held by `holder`."""

    waiter: str
    resource: str
    holder: str
    seconds: float
    stacks: list[str]
    """Stacks of all tasks and threads, from `penstock.stacks`."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() - self.seconds))
        title = f"stall: {self.waiter} waits for {self.resource}, held by {self.holder}, since {since}"
        return "\n".join([f"{title} ({self.seconds:.1f} s)", *self.stacks])


Listener = Callable[[Stall], object]


class deadline:  # noqa: N801 - used like a function, and on hot paths: a generator takes twice as long
    """Bounds the body to `seconds`, and raises `Stalled` after them.

    Any other `TimeoutError` from the body passes through unchanged. The body can reschedule the timer.
    """

    __slots__ = ("_facts", "_timer")

    def __init__(self, seconds: float, *, waiter: str, resource: str, holder: Holder) -> None:
        self._timer, self._facts = asyncio.timeout(seconds), (seconds, waiter, resource, holder)

    def __aenter__(self) -> Coroutine[Any, Any, asyncio.Timeout]:
        return self._timer.__aenter__()

    def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Coroutine[Any, Any, bool | None]:
        exiting = self._timer.__aexit__ if kind is None else self._explained  # only an exception can be an expiry
        return exiting(kind, error, trace)

    async def _explained(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timer.__aexit__(kind, error, trace)
        except TimeoutError as expired:
            seconds, waiter, resource, holder = self._facts
            cause = expired.__cause__
            raise stalled(
                waiter=waiter, resource=resource, holder=_name(holder), seconds=seconds, cause=cause
            ) from None


@contextmanager
def warn_if_stalled(seconds: float, *, waiter: str, resource: str, holder: Holder) -> Iterator[None]:
    """Report the wait after every `seconds` until the body ends. The body may take any time."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    timer: asyncio.TimerHandle

    def report_wait() -> None:
        nonlocal timer
        report(waiter=waiter, resource=resource, holder=_name(holder), seconds=loop.time() - started)
        timer = loop.call_later(seconds, report_wait)

    timer = loop.call_later(seconds, report_wait)
    try:
        yield
    finally:
        timer.cancel()


@asynccontextmanager
async def holding(
    lock: asyncio.Lock, seconds: float, *, waiter: str, resource: str, holder: Holder
) -> AsyncIterator[None]:
    """Hold `lock` during the body. `seconds` bound the wait for the lock."""
    async with deadline(seconds, waiter=waiter, resource=resource, holder=holder):
        await lock.acquire()
    try:
        yield
    finally:
        lock.release()


async def acquire_permit(semaphore: asyncio.Semaphore, *, waiter: str, resource: str, holder: Holder) -> None:
    """Acquire `semaphore`, without a time limit. The caller releases it."""
    with warn_if_stalled(PERMIT_S, waiter=waiter, resource=resource, holder=holder):
        await semaphore.acquire()


@asynccontextmanager
async def permit(semaphore: asyncio.Semaphore, *, waiter: str, resource: str, holder: Holder) -> AsyncIterator[None]:
    """Hold a permit of `semaphore` during the body."""
    await acquire_permit(semaphore, waiter=waiter, resource=resource, holder=holder)
    try:
        yield
    finally:
        semaphore.release()


def stalled(*, waiter: str, resource: str, holder: str, seconds: float, cause: BaseException | None = None) -> Stalled:
    """Report the stall, and return the error to raise. `cause` is the exception that interrupted the waiter."""
    report(waiter=waiter, resource=resource, holder=holder, seconds=seconds, cause=cause)
    return Stalled(waiter=waiter, resource=resource, holder=holder, seconds=seconds)


def report(*, waiter: str, resource: str, holder: str, seconds: float, cause: BaseException | None = None) -> None:
    """Write a report, unless another waiter already reported the same resource and holder recently."""
    if _reports.is_due(resource, holder, now=asyncio.get_running_loop().time()):
        own = [f"{waiter}\n{unwound(cause)}"] if cause is not None else []
        stall = Stall(waiter=waiter, resource=resource, holder=holder, seconds=seconds, stacks=[*own, *stacks()])
        _reports.listener(stall)


@contextmanager
def reporting_to(listener: Listener) -> Iterator[None]:
    """Send all reports of this process to `listener` instead of the log, during the body."""
    global _reports
    before, _reports = _reports, Reports(listener)
    try:
        yield
    finally:
        _reports = before


def write_to_log(stall: Stall) -> None:
    """Write the full report to the log."""
    logger.warning("%s", stall)


@dataclass(slots=True)
class Quiet:
    """The pause between two reports about one resource and holder."""

    until: float
    """End of the pause, on the clock of the event loop."""
    seconds: float
    """Length of the pause."""


@dataclass(slots=True)
class Reports:
    """The listener of reports, and the recent reports.

    If hundreds of waiters wait for the same resource, they cause one report, at growing intervals.
    """

    listener: Listener
    _quiet: dict[tuple[str, str], Quiet] = field(default_factory=dict)

    def is_due(self, resource: str, holder: str, *, now: float) -> bool:
        """Return whether to report this wait now. If so, count it as reported."""
        self._quiet = {key: each for key, each in self._quiet.items() if now < each.until + each.seconds}
        last = self._quiet.get((resource, holder))
        if last is not None and now < last.until:
            return False
        seconds = QUIET_S if last is None else min(2 * last.seconds, LONGEST_QUIET_S)
        self._quiet[resource, holder] = Quiet(now + seconds, seconds)
        return True


_reports = Reports(write_to_log)


@asynccontextmanager
async def alongside(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines for the length of the body. An error in one of them ends the body."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(work) for work in works]
        yield
        for task in running:
            task.cancel()


async def first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of the coroutines has ended, and cancel the others."""
    waiting = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


def _name(holder: Holder) -> str:
    return holder if isinstance(holder, str) else holder()
