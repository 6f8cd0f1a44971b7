"""A worker that attaches itself, seen by a real controller over a real bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.config import Config, default_config
from penstock.control.bus import CONTROLLER, Peer
from penstock.control.messages import Ack, AnyMessage, Goodbye, Heartbeat, Hello, TaskRequest
from penstock.control.runtime_files import Keys
from penstock.observe import jsonl
from penstock.observe.recorder import Recorder
from penstock.processes import controller
from penstock.processes.controller import Controller
from penstock.supervisor.child import Child

ENV = "env-attached-7"
URL = "http://127.0.0.1:1"


@dataclass
class Scheduler:
    """Only notes who comes and goes."""

    joined: list[tuple[str, int]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def add_worker(self, worker: str, capacity: int) -> None:
        self.joined.append((worker, capacity))

    def remove_worker(self, worker: str) -> None:
        self.lost.append(worker)


@dataclass
class Stage:
    controller: Controller
    scheduler: Scheduler
    run_dir: Path
    heard: asyncio.Queue[AnyMessage] = field(default_factory=asyncio.Queue)

    async def hear(self, _: str, message: AnyMessage) -> AnyMessage | None:
        self.heard.put_nowait(message)
        return None

    def welcome(self, role: str, name: str, url: str = "") -> None:
        """Somebody joins, as if over the bus."""
        self.controller._welcome(Hello(role=role, name=name, nonce="n", pid=1, url=url))

    def begin(self) -> None:
        """All servers and the trainer are there, and the run begins."""
        self.welcome("rollout", "rollout-0", URL)
        self.welcome("trainer", "trainer-0")
        self.controller.attach(SimpleNamespace(scheduler=self.scheduler))  # type: ignore[arg-type]

    def events(self, kind: str) -> list[str]:
        return [e.get("name", "") for e in jsonl.read(self.run_dir / "events.jsonl") if e["event"] == kind]


@asynccontextmanager
async def attached(run_dir: Path, config: Config, *, far: bool = False) -> AsyncIterator[tuple[Stage, Peer]]:
    """A controller, and a worker that attaches itself before anybody else is there; or, `far`, one of the run's own on
    another machine."""
    if far:
        Keys.make().write(run_dir)
    address = "127.0.0.1" if far else None
    child = Child(name=CONTROLLER, run_dir=run_dir, runtime_dir=run_dir, run_id="run", nonce="n", address=address)
    recorder = Recorder(run_dir)
    stage = Stage(Controller(config, child, recorder), Scheduler(), run_dir)
    if far:
        stage.controller._roles[ENV] = "env"
    peer = Peer(str(run_dir), ENV, stage.hear)
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(each) for each in (stage.controller.bus.run(), peer.run())]
        running.append(tasks.create_task(stage.controller.watch_registry()))
        hello = Hello(role="env", name=ENV, nonce=child.secret("greeting"), pid=7, attached=not far)
        joining = asyncio.create_task(peer.join(hello, timeout_s=60))
        while stage.controller._num_messages == 0:  # noqa: ASYNC110 - it is a real bus
            await asyncio.sleep(0.001)
        assert not joining.done() and stage.events("attached") == []
        stage.begin()
        assert (await joining).server_urls == [URL]
        await peer.request(CONTROLLER, TaskRequest(capacity=16), timeout_s=60)
        yield stage, peer
        for task in running:
            task.cancel()
    peer.close()
    stage.controller.bus.close()
    recorder.close()


async def test_who_came_before_the_servers_is_welcome_when_they_are_there(tmp_path: Path) -> None:
    async with attached(tmp_path, Config()) as (stage, _):
        assert stage.scheduler.joined == [(ENV, 16)]
        assert stage.events("attached") == [ENV] and stage.events("no_workers") == []


async def test_who_says_goodbye_is_lost_at_once_and_not_heard_any_more(tmp_path: Path) -> None:
    async with attached(tmp_path, default_config(["env.workers=0"])) as (stage, peer):
        for _ in range(2):
            beat = Heartbeat(progress=1, cpu_s=0.0)
            assert isinstance(await peer.request(CONTROLLER, Goodbye(), timeout_s=60), Ack)
            assert isinstance(await peer.request(CONTROLLER, beat, timeout_s=60), Ack)
        assert stage.scheduler.lost == [ENV] and stage.events("left") == [ENV]
        assert len(stage.events("no_workers")) == 2, "before it came and after it left"
        assert stage.heard.empty()


@pytest.mark.parametrize("far", [False, True])
async def test_who_says_nothing_is_lost_and_asked_who_it_is_when_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, far: bool
) -> None:
    monkeypatch.setattr(controller, "LOOK_EVERY_S", 0.01)
    async with attached(tmp_path, Config(), far=far) as (stage, peer):
        stage.controller._registry._silent_s = 0.05
        while not stage.scheduler.lost:  # noqa: ASYNC110 - it is lost by the clock
            await asyncio.sleep(0.01)
        assert stage.events("left") == [ENV]
        peer.notify(CONTROLLER, Heartbeat(progress=1, cpu_s=0.0))
        while type(await stage.heard.get()).__name__ != "WhoAreYou":
            pass
