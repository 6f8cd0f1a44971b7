"""Membership on the control bus, shared by all peers of the controller: join, send heartbeats, serve until told to
stop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from penstock.config import Config
from penstock.control.bus import CONTROLLER, Peer, PeerLost
from penstock.control.messages import AnyMessage, Heartbeat, Hello, StallReport, Welcome, WhoAreYou
from penstock.deadline import Stall, alongside, reporting_to, write_to_log
from penstock.ports.observer import BusySpan
from penstock.supervisor.child import Child

COSTS = "cost_"
"""Prefix of counters that only serve to fit a server's step times. Logs leave them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """The state that a process reports: totals since it started, and the spans since the last report."""

    progress: int = 0
    doing: str = ""
    """Current activity. Empty while the process is idle; then `progress` need not grow."""
    busy_s: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    spans: Sequence[BusySpan] = ()


class Member:
    """What a process does on the bus. These defaults are for a process that takes no part in the controller's work."""

    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        """Act on a message. Messages that are broadcast for other processes are ignored."""
        return None

    async def welcomed(self, peer: Peer, welcome: Welcome) -> None:
        """Take up work. Called with every welcome, including the first."""

    def abandoned(self) -> None:
        """Forget all work of a controller that died. The new controller hands out work again."""

    def telemetry(self) -> Telemetry:
        """Return the current state of the process."""
        return Telemetry()


@asynccontextmanager
async def membership(
    child: Child, config: Config, *, role: str, member: Member, url: str = "", attached: bool = False
) -> AsyncIterator[Peer]:
    """Join the control bus for the length of the body. An error in a handler of `member` ends the body.

    If the controller dies, its successor asks each peer to join again. Then the process forgets all work of the old
    controller, and joins again.
    """

    async def join() -> None:
        with suppress(PeerLost):  # the controller died; its successor asks this process to join again
            await member.welcomed(peer, await peer.join(hello, timeout_s=config.supervisor.ready_timeout_s))

    async def handle(sender: str, message: AnyMessage) -> AnyMessage | None:
        if not isinstance(message, WhoAreYou):
            return await member.handle(sender, message)
        member.abandoned()
        peer.forget(CONTROLLER)
        await join()
        return None

    def report(stall: Stall) -> None:
        write_to_log(stall)
        peer.notify(CONTROLLER, StallReport(stall=stall))

    peer = Peer(str(child.runtime_dir), child.name, handle)
    hello = Hello(
        role=role,
        name=child.name,
        nonce=child.secret("greeting"),
        pid=os.getpid(),
        url=url,
        host=child.host,
        attached=attached,
    )
    try:
        async with alongside(peer.run()):
            await join()
            pulses = _pulses(child, member.telemetry)

            async def beat() -> None:
                while True:
                    peer.notify(CONTROLLER, next(pulses))
                    await asyncio.sleep(config.supervisor.heartbeat_s)

            async with alongside(beat()):
                with reporting_to(report):
                    yield peer
                peer.notify(CONTROLLER, next(pulses))
    finally:
        peer.close()


def _pulses(child: Child, telemetry: Callable[[], Telemetry]) -> Iterator[Heartbeat]:
    """Turn running totals into heartbeats: tell the supervisor the totals, and yield the increments since the heartbeat
    before, for the controller."""
    before, before_cpu_s = Telemetry(), 0.0
    while True:
        now, cpu_s = telemetry(), time.process_time()
        counted = {name: total for name, total in now.counters.items() if not name.startswith(COSTS)}
        child.totals = {"busy_s": now.busy_s, **counted}
        child.pulse(now.progress, now.doing)
        counters = {name: total - before.counters.get(name, 0.0) for name, total in now.counters.items()}
        used_s, busy_s, spans = cpu_s - before_cpu_s, now.busy_s - before.busy_s, list(now.spans)
        yield Heartbeat(progress=now.progress, cpu_s=used_s, busy_s=busy_s, counters=counters, spans=spans)
        before, before_cpu_s = now, cpu_s
