"""The real environment worker. It sees when the run runs, and when it is told to end."""

from __future__ import annotations

import asyncio

from injection import Injector, Phase, faulty

from penstock.control.messages import AnyMessage, NewTask
from penstock.processes import bus_client, env, start
from roles.ending import watch_the_end

injector = Injector.of_this_process()


class Watched(env.Worker):
    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, NewTask):
            await asyncio.to_thread(injector.moment, Phase.RUNNING, nth=3)
        return await super().handle(peer, message)


if __name__ == "__main__":
    injector.moment(Phase.STARTING)
    watch_the_end(injector)
    bus_client.Peer = faulty(bus_client.Peer, injector)  # type: ignore[misc, assignment]
    env.Worker = Watched  # type: ignore[misc]
    start.main()
