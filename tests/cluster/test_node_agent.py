"""When a host gives up, on a virtual clock."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayError

from penstock.cluster.node_agent import PING_EVERY_S, PING_S, UNREACHABLE_S, NodeAgent, RunContext
from penstock.control.runtime_files import Keys
from penstock.simulator.clock import run_virtual


class Ended(BaseException):
    """The process did."""


class Probe:
    """On a machine that is out of reach between two moments. `ping` is its actor's method."""

    def __init__(self, *, cut_s: float, mended_s: float, hangs: bool) -> None:
        self._cut_s, self._mended_s, self._hangs = cut_s, mended_s, hangs
        self.ping = self

    async def remote(self) -> None:
        if self._cut_s <= asyncio.get_running_loop().time() < self._mended_s:
            if self._hangs:
                await asyncio.Event().wait()
            raise RayError


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodeAgent:
    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    context = RunContext(
        run_id="r", run_dir=tmp_path, token="t", namespace="n", directory=tmp_path, nonce="n", keys=Keys.make()
    )
    return NodeAgent("env-0", context)


def watched_s(agent: NodeAgent, probe: Any) -> float:
    """How long it watched, of a thousand seconds."""

    async def watch() -> float:
        try:
            async with asyncio.timeout(1000.0):
                await agent._watch(probe)
        except (Ended, TimeoutError):
            """The clock says which."""
        return asyncio.get_running_loop().time()

    return run_virtual(watch())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_host_ends_soon_after_its_supervisors_machine_is_out_of_reach(agent: NodeAgent, hangs: bool) -> None:
    ended = watched_s(agent, Probe(cut_s=100.0, mended_s=1000.0, hangs=hangs))
    assert 100.0 + UNREACHABLE_S - PING_EVERY_S <= ended <= 100.0 + UNREACHABLE_S + PING_EVERY_S + PING_S


@pytest.mark.parametrize("hangs", [False, True])
def test_a_host_outlives_a_short_interruption(agent: NodeAgent, hangs: bool) -> None:
    short_s = UNREACHABLE_S - PING_EVERY_S - PING_S
    assert watched_s(agent, Probe(cut_s=100.0, mended_s=100.0 + short_s, hangs=hangs)) == 1000.0


def test_a_host_that_was_held_up_itself_asks_once_more(agent: NodeAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Probe):
        """Whose one answer the host was too late for."""

        async def remote(self) -> None:
            if asyncio.get_running_loop().time() < UNREACHABLE_S:
                await asyncio.sleep(2 * UNREACHABLE_S)
                raise RayError

    monkeypatch.setattr("penstock.cluster.node_agent.PING_S", 10 * UNREACHABLE_S)
    assert watched_s(agent, Late(cut_s=0.0, mended_s=0.0, hangs=False)) == 1000.0
