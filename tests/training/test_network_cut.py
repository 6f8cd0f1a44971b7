"""Two network namespaces as two machines with real addresses; the cable between them is cut in mid-run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from cable import Cable
from spread_process import enter
from spread_run import Machines, SpreadRun
from stand_in_run import state_of
from test_several_machines import STEPS, events, lived, num_steps, until

from penstock.ports import PayloadsLost
from penstock.store.payloads import read_records
from penstock.supervisor.supervisor import Outcome
from penstock.types import PayloadRef

pytestmark = [pytest.mark.integration, pytest.mark.long]

SILENT_S = 12.0
"""Longer than what a connection lives on which nothing comes."""
GIVE_UP_MS = 3000


class FarDepot:
    """Reads on the far machine and sends over the cable."""

    def __init__(self, cable: Cable) -> None:
        self._cable = cable
        self._started = threading.Event()
        self._end = threading.Event()
        self._endpoint = ""
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> FarDepot:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    async def __call__(self, directory: Path, refs: Sequence[PayloadRef]) -> list[bytes]:
        with zmq.asyncio.Context() as context, context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._endpoint)
            await socket.send(msgspec.msgpack.encode((str(directory), list(refs))))
            if not await socket.poll(GIVE_UP_MS):
                raise PayloadsLost(f"host env does not give {refs[0].file}")
            return msgspec.msgpack.decode(await socket.recv(), type=list[bytes])

    def _serve(self) -> None:
        enter(self._cable.network)
        there = f"tcp://{self._cable.far}"
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            self._endpoint = f"{there}:{socket.bind_to_random_port(there)}"
            self._started.set()
            while not self._end.is_set():
                if socket.poll(100):
                    directory, refs = msgspec.msgpack.decode(socket.recv(), type=tuple[str, list[PayloadRef]])
                    socket.send(msgspec.msgpack.encode(read_records([Path(directory)], refs, host="env")))


async def test_a_cut_cable_costs_no_more_than_the_time_it_is_cut(tmp_path: Path, cable: Cable) -> None:
    """Workers and servers are on the far side, controller and trainer on the near one; all of them live on."""
    addresses = {"controller": cable.near, "trainer": cable.near, "rollout": cable.far, "env": cable.far}
    networks = {"rollout": cable.network, "env": cable.network}
    with FarDepot(cable) as depot:
        machines = Machines(addresses, networks, depots={"env": depot})
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
    addresses = dict.fromkeys(("controller", "trainer", "rollout", "env"), cable.near) | {"ranks": cable.far}
    run = SpreadRun(tmp_path, Machines(addresses, {"ranks": cable.network}), steps=STEPS, ranks=2)

    async def cut(life: asyncio.Task[Outcome]) -> None:
        await until(lambda: num_steps(run) >= 5, life)
        cable.cut()
        await until(lambda: state_of(run)["processes"]["trainer-0"].get("restarts"), life)
        cable.mend()

    await lived(run, cut)
    assert events(run, "rewound")
    restarts = {event["name"]: event["restarts"] for event in events(run, "process") if event.get("restarts")}
    assert restarts == {"trainer-0": 1}, "the keeper of the other rank goes on"
