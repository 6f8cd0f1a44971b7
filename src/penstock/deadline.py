"""Every await that can wait for somebody else goes through here, so that nobody waits in silence.

`deadline` bounds a wait and raises `Stalled` when the time is up. `patient` is for what may rightly last: it says that
nothing came, and goes on waiting. Both write a report: who waits, for what, held by whom, since when, and where every
task and thread of the process is at that moment. It goes to the log, and to whoever listens (`reporting_to`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from penstock.stacks import stacks, unwound

logger = logging.getLogger(__name__)

Holder = str | Callable[[], str]
"""Who holds what is waited for; a function, if only the end of the wait can tell."""

QUIET_S = 60.0
"""After a report, before the next about the same thing is worth another; doubled by each."""
LONGEST_QUIET_S = 3600.0
PLACE_S = 600.0
"""After so long a wait for a place is reported; those who hold one have deadlines."""


class Stalled(TimeoutError):
    """Somebody waited longer than allowed: `waiter` for `resource`, held by `holder`."""

    self_explanatory = True

    def __init__(self, *, waiter: str, resource: str, holder: str, seconds: float) -> None:
        self.waiter, self.resource, self.holder, self.seconds = waiter, resource, holder, seconds
        super().__init__(f"{waiter} waited {seconds:g} s for {resource}, held by {holder}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A report: `waiter` has waited `seconds` for `resource`, held by `holder`."""

    waiter: str
    resource: str
    holder: str
    seconds: float
    stacks: list[str]
    """See `penstock.stacks`."""

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time() - self.seconds))
        title = f"stall: {self.waiter} waits for {self.resource}, held by {self.holder}, since {since}"
        return "\n".join([f"{title} ({self.seconds:.1f} s)", *self.stacks])


Listener = Callable[[Stall], object]


@asynccontextmanager
async def deadline(seconds: float, *, waiter: str, resource: str, holder: Holder) -> AsyncIterator[asyncio.Timeout]:
    """Bound the body to `seconds`. A timeout raised by something else inside the body passes through unchanged. The
    timer can be set anew meanwhile."""
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield timer
    except TimeoutError as error:
        if not timer.expired() or isinstance(error, Stalled):
            raise
        holder = _name(holder)
        raise stalled(
            waiter=waiter, resource=resource, holder=holder, seconds=seconds, given_up=error.__cause__
        ) from None


@contextmanager
def patient(seconds: float, *, waiter: str, resource: str, holder: Holder) -> Iterator[None]:
    """The body may take as long as it likes; every `seconds` that it has not ended are a reason to report."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    timer: asyncio.TimerHandle

    def tell() -> None:
        nonlocal timer
        report(waiter=waiter, resource=resource, holder=_name(holder), seconds=loop.time() - started)
        timer = loop.call_later(seconds, tell)

    timer = loop.call_later(seconds, tell)
    try:
        yield
    finally:
        timer.cancel()


@asynccontextmanager
async def holding(
    lock: asyncio.Lock, seconds: float, *, waiter: str, resource: str, holder: Holder
) -> AsyncIterator[None]:
    """Hold `lock` for the length of the body; `seconds` bound the wait for it."""
    async with deadline(seconds, waiter=waiter, resource=resource, holder=holder):
        await lock.acquire()
    try:
        yield
    finally:
        lock.release()


async def take_place(places: asyncio.Semaphore, *, waiter: str, resource: str, holder: Holder) -> None:
    """Take one of `places`, however long that lasts; whoever has it releases it."""
    with patient(PLACE_S, waiter=waiter, resource=resource, holder=holder):
        await places.acquire()


@asynccontextmanager
async def placed(places: asyncio.Semaphore, *, waiter: str, resource: str, holder: Holder) -> AsyncIterator[None]:
    """Have one of `places` for the length of the body."""
    await take_place(places, waiter=waiter, resource=resource, holder=holder)
    try:
        yield
    finally:
        places.release()


def stalled(
    *, waiter: str, resource: str, holder: str, seconds: float, given_up: BaseException | None = None
) -> Stalled:
    """Reports it, and returns the error to raise. `given_up`: what tore the waiter from where it waited."""
    report(waiter=waiter, resource=resource, holder=holder, seconds=seconds, given_up=given_up)
    return Stalled(waiter=waiter, resource=resource, holder=holder, seconds=seconds)


def report(*, waiter: str, resource: str, holder: str, seconds: float, given_up: BaseException | None = None) -> None:
    """Write a report, unless somebody else who waits for the same of the same holder has caused one a while ago."""
    if _reports.wanted(resource, holder, now=asyncio.get_running_loop().time()):
        own = [f"{waiter}\n{unwound(given_up)}"] if given_up is not None else []
        stall = Stall(waiter=waiter, resource=resource, holder=holder, seconds=seconds, stacks=[*own, *stacks()])
        _reports.listener(stall)


@contextmanager
def reporting_to(listener: Listener) -> Iterator[None]:
    """All reports of this process go to `listener` instead of the log alone, for the length of the body."""
    global _reports
    before, _reports = _reports, Reports(listener)
    try:
        yield
    finally:
        _reports = before


def write_to_log(stall: Stall) -> None:
    """The whole of it."""
    logger.warning("%s", stall)


@dataclass(slots=True)
class Quiet:
    """For how long nothing more is said of something."""

    until: float
    """On the loop's clock."""
    seconds: float


@dataclass(slots=True)
class Reports:
    """Who hears of them, and what was said lately: what hundreds wait for is told once, at growing intervals."""

    listener: Listener
    _quiet: dict[tuple[str, str], Quiet] = field(default_factory=dict)

    def wanted(self, resource: str, holder: str, *, now: float) -> bool:
        """Whether it is time to say it, as of which it counts as said."""
        self._quiet = {what: each for what, each in self._quiet.items() if now < each.until + each.seconds}
        last = self._quiet.get((resource, holder))
        if last is not None and now < last.until:
            return False
        seconds = QUIET_S if last is None else min(2 * last.seconds, LONGEST_QUIET_S)
        self._quiet[resource, holder] = Quiet(now + seconds, seconds)
        return True


_reports = Reports(write_to_log)


def _name(holder: Holder) -> str:
    return holder if isinstance(holder, str) else holder()
