"""Two network namespaces as two machines with real addresses; the cable between them is cut in mid-run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from cable import Cable
from spread_process import enter
from spread_run import Machines, SpreadRun
from stand_in_run import state_of
from test_several_machines import STEPS, events, lived, num_steps, until

from penstock.runtime.file_service import serving_files
from penstock.supervisor.supervisor import Outcome

pytestmark = [pytest.mark.integration, pytest.mark.long]

SILENT_S = 12.0
"""Longer than what a connection lives on which nothing comes."""


@asynccontextmanager
async def far_files(cable: Cable, places: Sequence[Path], secret: str) -> AsyncIterator[str]:
    """The file service of the far machine: a thread there, which gives its files over the cable."""
    found: Future[str] = Future()
    end = threading.Event()

    async def serve() -> None:
        async with serving_files(places, address=cable.far, secret=secret) as url:
            found.set_result(url)
            await asyncio.to_thread(end.wait)

    def live() -> None:
        enter(cable.network)
        asyncio.run(serve())

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield await asyncio.wrap_future(found)
    finally:
        end.set()
        await asyncio.to_thread(thread.join)


async def test_a_cut_cable_costs_no_more_than_the_time_it_is_cut(tmp_path: Path, cable: Cable) -> None:
    """Workers and servers are on the far side, controller and trainer on the near one; all of them live on."""
    addresses = {"controller": cable.near, "trainer": cable.near, "rollout": cable.far, "env": cable.far}
    networks = {"rollout": cable.network, "env": cable.network}
    machines = Machines(addresses, networks, services=dict.fromkeys(networks, partial(far_files, cable)))
    run = SpreadRun(tmp_path, machines, steps=STEPS, silent_s=SILENT_S)

    async def cut(life: asyncio.Task[Outcome]) -> None:
        await until(lambda: num_steps(run) >= 3, life)
        cable.cut()
        await until(lambda: {event["name"] for event in events(run, "left")} == {"env-0", "env-1"}, life)
        cable.mend()

    await lived(run, cut)
    restarts = {event["name"]: event["restarts"] for event in events(run, "process") if event.get("restarts")}
    assert restarts == {}


async def test_ranks_that_are_cut_off_from_each_other_begin_anew(tmp_path: Path, cable: Cable) -> None:
    """One is on each side. What the trainer had not saved is trained again as soon as they reach each other."""
    addresses = dict.fromkeys(("controller", "trainer", "rank", "rollout", "env"), cable.near)
    addresses |= {"rank-1": cable.far}
    networks = {"rank-1": cable.network}
    machines = Machines(addresses, networks, services=dict.fromkeys(networks, partial(far_files, cable)))
    run = SpreadRun(tmp_path, machines, steps=STEPS, ranks=2)

    async def cut(life: asyncio.Task[Outcome]) -> None:
        await until(lambda: num_steps(run) >= 5, life)
        cable.cut()
        await until(lambda: state_of(run)["processes"]["trainer-0"].get("restarts"), life)
        cable.mend()

    await lived(run, cut)
    assert events(run, "rewound")
    restarts = {event["name"]: event["restarts"] for event in events(run, "process") if event.get("restarts")}
    assert restarts == dict.fromkeys(["trainer-0", "rank-0", "rank-1"], 1), "all of them together, once"
