"""Membership on the control bus survives the death of a controller at any moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.config import Config
from penstock.control.bus import CONTROLLER, Bus, Peer
from penstock.control.messages import AnyMessage, Hello, TaskRequest, Welcome, WhoAreYou
from penstock.processes.bus_client import Member, membership
from penstock.supervisor.child import Child

NAME = "env-0"
END_S = 30.0


class Asking(Member):
    """Asks for work with every welcome, as an environment worker does."""

    def __init__(self) -> None:
        self.num_abandoned = 0
        self.answered = asyncio.Event()

    async def welcomed(self, peer: Peer, welcome: Welcome) -> None:
        await peer.request(CONTROLLER, TaskRequest(capacity=1), timeout_s=END_S)
        self.answered.set()

    def abandoned(self) -> None:
        self.num_abandoned += 1


async def test_a_controller_may_die_while_a_process_joins_it(tmp_path: Path) -> None:
    """The first two controllers die before they answer the request for work. The third one answers it."""
    member, num_asked, asked = Asking(), 0, asyncio.Event()

    async def handle(peer: str, message: AnyMessage) -> AnyMessage | None:
        nonlocal num_asked
        if isinstance(message, Hello):
            return Welcome(server_urls=[])
        if isinstance(message, TaskRequest):
            num_asked += 1
            asked.set()
            if num_asked <= 2:
                await asyncio.Event().wait()
        return None

    child = Child(name=NAME, run_dir=tmp_path, runtime_dir=tmp_path, run_id="run", nonce="nonce")
    bus = Bus(str(tmp_path), handle, nonce=child.secret("greeting"))

    async def take_over() -> None:
        for _ in range(2):
            await asked.wait()
            asked.clear()
            bus.notify(NAME, WhoAreYou())

    async with asyncio.timeout(END_S), asyncio.TaskGroup() as tasks:
        receiving = tasks.create_task(bus.run())
        tasks.create_task(take_over())
        async with membership(child, Config(), role="env", member=member):
            await member.answered.wait()
        receiving.cancel()
    bus.close()
    assert (num_asked, member.num_abandoned) == (3, 2)
