"""Two network namespaces as two machines with real addresses; the cable between them is cut in mid-run."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from spread_process import enter
from spread_run import Machines, SpreadRun
from stand_in_run import state_of
from test_several_machines import STEPS, events, lived, num_steps, until

from penstock.ports import PayloadsLost
from penstock.store.payloads import read_records
from penstock.supervisor.supervisor import Outcome
from penstock.types import PayloadRef

pytestmark = [pytest.mark.integration, pytest.mark.long]

NETWORK = f"far{os.getpid()}"
NEAR_END, FAR_END = f"n{os.getpid()}", f"f{os.getpid()}"
NEAR, FAR = (f"10.77.{os.getpid() % 250}.{number}" for number in (1, 2))
SILENT_S = 12.0
"""Longer than what a connection lives on which nothing comes."""
GIVE_UP_MS = 3000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def cable() -> Iterator[None]:
    """From here to another network, in which nobody but it is reached."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need `ip` and root")
    try:
        ip("netns", "add", NETWORK)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr.decode()}")
    try:
        ip("link", "add", NEAR_END, "type", "veth", "peer", "name", FAR_END, "netns", NETWORK)
        ip("addr", "add", f"{NEAR}/30", "dev", NEAR_END)
        ip("-n", NETWORK, "addr", "add", f"{FAR}/30", "dev", FAR_END)
        ip("link", "set", NEAR_END, "up")
        for device in ("lo", FAR_END):
            ip("-n", NETWORK, "link", "set", device, "up")
        yield
    finally:
        ip("netns", "del", NETWORK)  # and the cable with it


class FarDepot:
    """Reads on the far machine and sends over the cable."""

    def __init__(self) -> None:
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
        enter(NETWORK)
        with zmq.Context() as context, context.socket(zmq.REP) as socket:
            self._endpoint = f"tcp://{FAR}:{socket.bind_to_random_port(f'tcp://{FAR}')}"
            self._started.set()
            while not self._end.is_set():
                if socket.poll(100):
                    directory, refs = msgspec.msgpack.decode(socket.recv(), type=tuple[str, list[PayloadRef]])
                    socket.send(msgspec.msgpack.encode(read_records([Path(directory)], refs, host="env")))


@pytest.mark.usefixtures("cable")
async def test_a_cut_cable_costs_no_more_than_the_time_it_is_cut(tmp_path: Path) -> None:
    """Workers and servers are on the far side, controller and trainer on the near one; all of them live on."""
    addresses = {"controller": NEAR, "trainer": NEAR, "rollout": FAR, "env": FAR}
    networks = {"rollout": NETWORK, "env": NETWORK}
    with FarDepot() as depot:
        machines = Machines(addresses, networks, depots={"env": depot})
        run = SpreadRun(tmp_path, machines, steps=STEPS, silent_s=SILENT_S)

        async def cut(life: asyncio.Task[Outcome]) -> None:
            await until(lambda: num_steps(run) >= 3, life)
            ip("link", "set", NEAR_END, "down")
            await until(lambda: {event["name"] for event in events(run, "left")} == {"env-0", "env-1"}, life)
            ip("link", "set", NEAR_END, "up")

        await lived(run, cut)
    restarts = {event["name"]: event["restarts"] for event in events(run, "process") if event.get("restarts")}
    assert restarts == {}


@pytest.mark.usefixtures("cable")
async def test_ranks_that_are_cut_off_from_each_other_begin_anew(tmp_path: Path) -> None:
    """One is on each side. What the trainer had not saved is trained again as soon as they reach each other."""
    addresses = {"controller": NEAR, "trainer": NEAR, "rollout": NEAR, "env": NEAR, "ranks": FAR}
    run = SpreadRun(tmp_path, Machines(addresses, {"ranks": NETWORK}), steps=STEPS, ranks=2)

    async def cut(life: asyncio.Task[Outcome]) -> None:
        await until(lambda: num_steps(run) >= 5, life)
        ip("link", "set", NEAR_END, "down")
        await until(lambda: state_of(run)["processes"]["trainer-0"].get("restarts"), life)
        ip("link", "set", NEAR_END, "up")

    await lived(run, cut)
    assert events(run, "rewound")
    restarts = {event["name"]: event["restarts"] for event in events(run, "process") if event.get("restarts")}
    assert restarts == {"trainer-0": 1}, "the keeper of the other rank goes on"
