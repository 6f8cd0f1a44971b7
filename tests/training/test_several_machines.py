"""Whole runs whose processes are told of several machines: addresses, TCP, pools and weights that are not shared."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from spread_run import Machines, SpreadRun
from stand_in_run import state_of
from test_deaths import trained_tasks
from test_training_run import leftovers, lines

from penstock.supervisor.states import RunState
from penstock.supervisor.supervisor import Outcome

pytestmark = [pytest.mark.integration, pytest.mark.long]

LOOPBACK = {"controller": "127.0.0.1", "rollout": "127.0.0.2", "trainer": "127.0.0.3", "env": "127.0.0.4"}
LIMIT_S = 240
STEPS = 12
GROUPS_PER_STEP = 8


def events(run: SpreadRun, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(run.run_dir / "events.jsonl") if event["event"] == kind]


def num_steps(run: SpreadRun) -> int:
    return max((line["step"] for line in lines(run.run_dir / "metrics.jsonl")), default=0)


async def until(happened: Callable[[], object], life: asyncio.Task[Outcome]) -> None:
    """It does while the run goes on."""
    while not happened():
        assert not life.done(), life.result()
        await asyncio.sleep(0.05)


async def lived(run: SpreadRun, meanwhile: Callable[[asyncio.Task[Outcome]], Any], *, limit_s: float = LIMIT_S) -> None:
    """The run, to its end; and the books are in order."""
    async with asyncio.timeout(limit_s):
        life = asyncio.create_task(run.supervise())
        try:
            await meanwhile(life)
            outcome = await life
        finally:
            life.cancel()
            await asyncio.wait([life])
    assert outcome.status is RunState.COMPLETED, outcome
    trained = trained_tasks(run.run_dir)
    assert [len(tasks) for tasks in trained] == [GROUPS_PER_STEP] * STEPS
    assert len({task for tasks in trained for task in tasks}) == GROUPS_PER_STEP * STEPS, "each of them once"
    asked = run.machines.asked | (run.machines.services.keys() & {"env"})
    assert asked == {"controller", "env"}, "workers' records came to the pool, and on to the trainer"
    assert not list((run.run_dir / "pool").glob("env-[01]-00*.seg")), "nobody but the controller writes there"
    assert leftovers(run.run_dir) == []


async def test_a_run_trains_across_machines_whatever_is_lost(tmp_path: Path) -> None:
    """Lose records, then the controller, then the trainer together with its latest weights."""
    run = SpreadRun(tmp_path, Machines(LOOPBACK), steps=STEPS)

    def kill(name: str) -> None:
        os.kill(state_of(run)["processes"][name]["pid"], signal.SIGKILL)

    async def happenings(life: asyncio.Task[Outcome]) -> None:
        await until(lambda: num_steps(run) >= 2, life)
        await until(lambda: is_fetched_once(run), life)
        ways = [line["servers_by_transport"] for line in lines(run.run_dir / "metrics.jsonl")]
        assert ways[-1].keys() <= {"collective", "shared_memory"} and "collective" in ways[-1], ways
        await check_listeners(run)
        assert not events(run, "payloads_unfetched")
        run.machines.lost = 5
        await until(lambda: num_steps(run) >= 4 and len(events(run, "payloads_unfetched")) == 5, life)
        kill("controller")
        await until(lambda: num_steps(run) >= 7, life)
        kill("trainer-0")

    await lived(run, happenings)
    told = events(run, "payloads_unfetched")
    assert len(told) == 5, "each of them is played again"
    assert all("HTTP 403" in event["reason"] for event in told)
    assert events(run, "adopted"), "the controller came back at another port, and all have found it"
    assert state_of(run)["processes"]["env-0"]["restarts"] == 0
    assert state_of(run)["processes"]["trainer-0"]["restarts"] == 1
    assert events(run, "rewound")


@pytest.mark.parametrize(
    ("update_mode", "ways"),
    [
        pytest.param("retract", {"collective": 2}, id="into-the-engine"),
        pytest.param("drain", {"collective": 1, "shared_memory": 1}, id="to-its-machine"),
    ],
)
async def test_engines_of_others_get_their_weights_by_broadcast(
    tmp_path: Path, update_mode: str, ways: dict[str, int]
) -> None:
    """And go on without one that dies. Who was to get a broadcast together with it fetches the file by HTTP."""
    rollout = {"engine": "sglang", "python": str(python_of_stand_in(tmp_path)), "update_mode": update_mode}
    run = SpreadRun(tmp_path, Machines(LOOPBACK), steps=STEPS, rollout=rollout)

    async def happenings(life: asyncio.Task[Outcome]) -> None:
        await until(lambda: num_steps(run) >= 2, life)
        os.kill(state_of(run)["processes"]["rollout-0"]["pid"], signal.SIGKILL)

    await lived(run, happenings)
    found = [line["servers_by_transport"] for line in lines(run.run_dir / "metrics.jsonl")]
    assert ways in found and all(way in (ways, {"file": 1}) or way.keys() <= ways.keys() for way in found), found
    assert not list((run.run_dir / "weights").glob("*")), "no folder is shared for them"


def python_of_stand_in(folder: Path) -> Path:
    """Return an interpreter that runs the stand-in in the place of SGLang."""
    python, stand_in = folder / "python", Path(__file__).parent / "sglang_stand_in.py"
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] || {{ shift 2; set {stand_in} "$@"; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def is_fetched_once(run: SpreadRun) -> bool:
    """The servers see none of the trainer's files; both have the one that came to their machine."""
    received = list(run.runtime_dir.glob("rollout/received/*/*.safetensors"))
    with suppress(FileNotFoundError):  # the next one comes
        return len(received) == 2 and received[0].samefile(received[1])
    return False


async def check_listeners(run: SpreadRun) -> None:
    """Servers listen on their own machine's address, and ask for a key."""
    (url,) = {e["url"] for e in events(run, "joined") if e["name"] == "rollout-0"}
    assert url.startswith("http://127.0.0.2:")
    async with aiohttp.ClientSession() as session:
        for path, body in (("/generate", {"text": "a"}), ("/weights/abort", {})):
            async with session.post(url + path, json=body) as reply:
                assert reply.status == 401, "the run made keys, and nobody else has them"
