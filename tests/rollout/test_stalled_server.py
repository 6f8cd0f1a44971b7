"""Asked at night why nothing happens, the log names who waits, for what, held by whom, and where everybody is."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from open_episode import open_episode

from penstock.deadline import Stall, Stalled, deadline, reporting_to
from penstock.envs.episode import Episode, spending
from penstock.rollout import client as client_module
from penstock.rollout import servers as servers_module
from penstock.rollout.servers import Servers
from penstock.samples import Segment
from penstock.simulator.clock import run_virtual


class Stopped:
    """The client of a server whose process was stopped: it takes whatever is sent, and says nothing."""

    def __init__(self, url: str, *_: Any, **__: Any) -> None:
        self.url = url

    async def generate(self, *_: Any) -> list[Segment]:
        return await asyncio.get_running_loop().create_future()

    async def alive(self) -> None:
        async with deadline(client_module.PROBE_S, waiter="rollout client", resource="GET /health", holder=self.url):
            await asyncio.get_running_loop().create_future()


async def ask(servers: Servers, asking: Episode) -> None:
    async with spending([asking], resource="an answer", holder="a rollout server"):
        await servers.generate([5], [asking.grant], asking.sampling, [0])


def test_a_stopped_server_is_named_while_episodes_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(servers_module.CLIENTS, "penstock", Stopped)
    told: list[Stall] = []

    async def main() -> None:
        servers = Servers(["http://server:1"])
        waiting = [
            asyncio.create_task(ask(servers, open_episode(number, deadline_s=120.0)), name=f"episode-{number}")
            for number in range(3)
        ]
        await asyncio.wait(waiting)
        assert asyncio.get_running_loop().time() == 120.0
        for task in waiting:
            assert isinstance(task.exception(), Stalled)

    with reporting_to(told.append):
        run_virtual(main())
    probe, held, *later, end = told
    assert (probe.waiter, probe.resource, probe.holder) == ("rollout client", "GET /health", "http://server:1")
    assert held.waiter in {"train/0/0/0", "train/1/0/0", "train/2/0/0"}
    assert (held.resource, held.holder) == ("an answer", "http://server:1")
    assert held.seconds < 30.0, "long before the lease is over"
    everybody = next(stack for stack in held.stacks if "_generate_on" in stack)
    assert "episode-" in everybody and "in generate" in everybody
    assert {stall.holder for stall in later} == {"http://server:1"}
    assert end.waiter.endswith("/0/0 of t") and (end.holder, end.seconds) == ("a rollout server", 120.0)
    assert "in _watch" in end.stacks[0], "where it was when its time was up"


@pytest.fixture
def stopped_process() -> Iterator[str]:
    """The URL of a real server that the system has stopped."""
    code = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.SimpleHTTPRequestHandler)"
    server = subprocess.Popen(
        [sys.executable, "-u", "-c", f"{code}; print(s.server_port); s.serve_forever()"], stdout=subprocess.PIPE
    )
    with server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        server.send_signal(signal.SIGSTOP)
        yield f"http://127.0.0.1:{port}"
        server.kill()


@pytest.mark.integration
async def test_so_is_a_real_one(stopped_process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "SILENCE_S", 0.05)
    monkeypatch.setattr(client_module, "PROBE_S", 0.05)
    told: asyncio.Queue[Stall] = asyncio.Queue()
    servers = Servers([stopped_process])
    with reporting_to(told.put_nowait):
        asking = asyncio.create_task(ask(servers, open_episode(0, deadline_s=600.0)))
        while (held := await told.get()).waiter != "train/0/0/0":
            pass
        asking.cancel()
        await asyncio.wait([asking])
        with pytest.raises(Stalled, match="train/1/0/0 of t waited 1 s for an answer"):
            await ask(servers, open_episode(1, deadline_s=1.0))
    await servers.close()
    assert (held.resource, held.holder) == ("an answer", stopped_process)
    assert any("in send" in stack for stack in held.stacks)
