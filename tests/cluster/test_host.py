"""When a host gives up, on a virtual clock."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayError

from penstock.cluster.host import ALONE_S, ANSWER_S, BETWEEN_ASKS_S, Host, Household
from penstock.control.keys import Keys
from penstock.simulator.clock import run_virtual


class Ended(BaseException):
    """The process did."""


class Depot:
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
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    household = Household(
        run_id="r", run_dir=tmp_path, token="t", namespace="n", directory=tmp_path, nonce="n", keys=Keys.make()
    )
    return Host("env-0", household)


def watched_s(host: Host, depot: Any) -> float:
    """How long it watched, of a thousand seconds."""

    async def watch() -> float:
        try:
            async with asyncio.timeout(1000.0):
                await host._watch(depot)
        except (Ended, TimeoutError):
            """The clock says which."""
        return asyncio.get_running_loop().time()

    return run_virtual(watch())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_host_ends_soon_after_its_supervisors_machine_is_out_of_reach(host: Host, hangs: bool) -> None:
    ended = watched_s(host, Depot(cut_s=100.0, mended_s=1000.0, hangs=hangs))
    assert 100.0 + ALONE_S - BETWEEN_ASKS_S <= ended <= 100.0 + ALONE_S + BETWEEN_ASKS_S + ANSWER_S


@pytest.mark.parametrize("hangs", [False, True])
def test_a_host_outlives_a_short_interruption(host: Host, hangs: bool) -> None:
    short_s = ALONE_S - BETWEEN_ASKS_S - ANSWER_S
    assert watched_s(host, Depot(cut_s=100.0, mended_s=100.0 + short_s, hangs=hangs)) == 1000.0


def test_a_host_that_was_held_up_itself_asks_once_more(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Depot):
        """Whose one answer the host was too late for."""

        async def remote(self) -> None:
            if asyncio.get_running_loop().time() < ALONE_S:
                await asyncio.sleep(2 * ALONE_S)
                raise RayError

    monkeypatch.setattr("penstock.cluster.host.ANSWER_S", 10 * ALONE_S)
    assert watched_s(host, Late(cut_s=0.0, mended_s=0.0, hangs=False)) == 1000.0
