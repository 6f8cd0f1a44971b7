"""What the controller's peers share: join the control bus, send heartbeats, serve until told to stop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.config import Config
from penstock.control.bus import CONTROLLER, Handler, Peer
from penstock.control.messages import AnyMessage, Heartbeat, Hello, StallReport, Welcome, WhoAreYou
from penstock.deadline import Stall, reporting_to, write_to_log
from penstock.supervisor.child import Child
from penstock.types import BusySpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What a process tells of itself: totals since it started, spans since it was last asked."""

    progress: int = 0
    doing: str = ""
    """Empty: it has nothing to do, and so need not get any further."""
    busy_s: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    spans: Sequence[BusySpan] = ()


@asynccontextmanager
async def membership(
    child: Child,
    config: Config,
    *,
    role: str,
    handler: Handler,
    telemetry: Callable[[], Telemetry],
    url: str = "",
    attached: bool = False,
    abandoned: Callable[[], None] = lambda: None,
    welcomed: Callable[[Peer, Welcome], Awaitable[None]] | None = None,
) -> AsyncIterator[Peer]:
    """On the bus for the length of the body; a failing handler ends it. When the controller died and another one asks
    who this is: `abandoned` forgets all that the old one had given, then it joins anew. `welcomed` hears of every
    welcome, the first one too."""

    async def join() -> None:
        welcome = await peer.join(hello, timeout_s=config.supervisor.ready_timeout_s)
        if welcomed is not None:
            await welcomed(peer, welcome)

    async def hear(sender: str, message: AnyMessage) -> AnyMessage | None:
        if not isinstance(message, WhoAreYou):
            return await handler(sender, message)
        abandoned()
        peer.forget(CONTROLLER)
        await join()
        return None

    def tell(stall: Stall) -> None:
        write_to_log(stall)
        peer.notify(CONTROLLER, StallReport(stall=stall))

    peer = Peer(str(child.runtime_dir), child.name, hear)
    hello = Hello(
        role=role,
        name=child.name,
        nonce=child.nonce,
        pid=os.getpid(),
        url=url,
        host=child.host,
        attached=attached,
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(peer.run())
            await join()
            pulse = _Pulse(child, telemetry)
            beating = tasks.create_task(_beat(peer, pulse, config.supervisor.heartbeat_s))
            with reporting_to(tell):
                yield peer
            peer.notify(CONTROLLER, pulse.beat())
            beating.cancel()
            receiving.cancel()
    finally:
        peer.close()


async def _beat(peer: Peer, pulse: _Pulse, period_s: float) -> None:
    while True:
        peer.notify(CONTROLLER, pulse.beat())
        await asyncio.sleep(period_s)


async def first(*waits: Coroutine[Any, Any, object]) -> None:
    """Until one of them has ended; the others are given up."""
    waiting = [asyncio.ensure_future(each) for each in waits]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


async def ask_nothing(_: str, message: AnyMessage) -> AnyMessage | None:
    """Handler of those whom nobody asks anything over the bus; broadcasts are for others."""
    return None


class _Pulse:
    """Makes heartbeats of totals, for the supervisor too."""

    def __init__(self, child: Child, telemetry: Callable[[], Telemetry]) -> None:
        self._child, self._telemetry = child, telemetry
        self._cpu_s, self._told = 0.0, Telemetry()

    def beat(self) -> Heartbeat:
        before, before_cpu_s = self._told, self._cpu_s
        told, self._cpu_s = self._telemetry(), time.process_time()
        self._told = told
        self._child.pulse(told.progress, told.doing)
        return Heartbeat(
            name=self._child.name,
            progress=told.progress,
            cpu_s=self._cpu_s - before_cpu_s,
            busy_s=told.busy_s - before.busy_s,
            counters={name: total - before.counters.get(name, 0.0) for name, total in told.counters.items()},
            spans=list(told.spans),
        )
