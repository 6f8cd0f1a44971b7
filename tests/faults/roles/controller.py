"""The real controller. It sees when the run runs, and when it stops."""

from __future__ import annotations

import asyncio

from injection import Injector, Phase, faulty

from penstock.control.messages import AnyMessage, DataGenerated
from penstock.processes import controller, start
from penstock.system import System

injector = Injector.of_this_process()
conclude = controller.conclude


class Watched(controller.Controller):
    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, DataGenerated):
            await asyncio.to_thread(injector.moment, Phase.RUNNING, nth=3)
        return await super().handle(peer, message)


async def watched_conclude(system: System) -> None:
    injector.moment(Phase.STOPPING)
    await conclude(system)


if __name__ == "__main__":
    injector.moment(Phase.STARTING)
    controller.Bus = faulty(controller.Bus, injector)  # type: ignore[misc, assignment]
    controller.Controller = Watched  # type: ignore[misc]
    controller.conclude = watched_conclude
    start.main()
