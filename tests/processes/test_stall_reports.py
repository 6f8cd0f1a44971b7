"""Whoever waits too long anywhere in a run is found in its events."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config
from penstock.deadline import Stalled, deadline, reporting_to
from penstock.observe import jsonl
from penstock.observe.recorder import Recorder
from penstock.processes.bus_client import Member, membership
from penstock.processes.controller import Controller
from penstock.supervisor.child import Child


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path


def child(run_dir: Path, name: str) -> Child:
    return Child(name=name, run_dir=run_dir, runtime_dir=run_dir, run_id="run", nonce="nonce")


def stalls(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in jsonl.read(run_dir / "events.jsonl") if event["event"] == "stall"]


async def wait_in_vain() -> None:
    with pytest.raises(Stalled):
        async with deadline(0.01, waiter="episode 3", resource="an answer", holder="rollout-0"):
            await asyncio.Event().wait()


async def test_those_of_every_process_and_of_the_controller(run_dir: Path) -> None:
    recorder = Recorder(run_dir)
    controller = Controller(Config(), child(run_dir, "controller"), recorder)
    receiving = asyncio.create_task(controller.bus.run())
    async with membership(child(run_dir, "trainer-0"), Config(), role="trainer", member=Member()):
        await wait_in_vain()
        async with asyncio.timeout(60):
            while not stalls(run_dir):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    with reporting_to(controller.record_stall):
        await wait_in_vain()
    receiving.cancel()
    await asyncio.wait([receiving])
    controller.bus.close()
    recorder.close()
    found = stalls(run_dir)
    assert [stall["process"] for stall in found] == ["trainer-0", "controller"]
    for stall in found:
        assert (stall["waiter"], stall["resource"], stall["holder"]) == ("episode 3", "an answer", "rollout-0")
        assert stall["seconds"] == 0.01
        assert "in wait_in_vain" in stall["stacks"][0]
