"""The moment at which a process is told to end."""

from __future__ import annotations

import asyncio

from injection import Injector, Phase

from penstock.supervisor.child import Child


def watch_the_end(injector: Injector) -> None:
    """Act before the tasks that wait for the event continue."""
    make_event = Child.stop_event
    watching: set[asyncio.Task[None]] = set()

    async def watch(stop: asyncio.Event) -> None:
        await stop.wait()
        injector.moment(Phase.STOPPING)

    def stop_event(self: Child) -> asyncio.Event:
        stop = make_event(self)
        watching.add(asyncio.create_task(watch(stop)))
        return stop

    Child.stop_event = stop_event  # type: ignore[method-assign]
