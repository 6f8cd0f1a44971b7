"""An environment worker on a real bus: every NEW_TASK is answered, whatever environments, grants and cancels do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.config import Config, TinyModelConfig
from penstock.control.bus import Bus, Peer
from penstock.control.messages import AnyMessage, Cancel, DataGenerated, Grant, GrantRequest, NewTask
from penstock.envs.manager import EnvManager
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.ports import Environment, Work
from penstock.processes.env import Worker
from penstock.rollout.scripted import ScriptedPolicy
from penstock.store.payload import PayloadReader
from penstock.types import EpisodeId, EpisodeLease, Sampling, SegmentGrant, Task


class Controller:
    """Collects what a worker sends."""

    def __init__(self) -> None:
        self.generated: asyncio.Queue[DataGenerated] = asyncio.Queue()
        self.requests: asyncio.Queue[GrantRequest] = asyncio.Queue()

    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        match message:
            case DataGenerated():
                self.generated.put_nowait(message)
            case GrantRequest():
                self.requests.put_nowait(message)
        return None


class Quick:
    def __init__(self, task: Task) -> None:
        pass

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "say ok", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, True, False, {}


class Unbuildable(Quick):
    def __init__(self, task: Task) -> None:
        raise OSError("no sandbox left")


def job(group: int, *, attempt: int = 0, grant: int = 8) -> NewTask:
    episodes = [EpisodeId("train", group, member, attempt) for member in range(2)]
    leases = tuple(EpisodeLease(episode=e, env_seed=1, sampling_seed=1, deadline_s=10.0) for e in episodes)
    return NewTask(
        work=Work(
            task=Task(task_id="t", tag="train", index=0),
            leases=leases,
            grants=tuple(SegmentGrant(episode=e, max_tokens=grant) for e in episodes),
            sampling=Sampling(max_new_tokens=8),
        )
    )


@asynccontextmanager
async def working(
    directory: Path, make: Callable[[Task], Environment], answer: str = "ok"
) -> AsyncIterator[tuple[Controller, Bus]]:
    write_tiny_model(directory / "model", TinyModelConfig(), 512)
    chat = ChatTokenizer.load(directory / "model")
    controller = Controller()
    bus = Bus(str(directory), controller.handle)
    async with asyncio.TaskGroup() as tasks:
        worker = Worker(Config(), "env-0", directory, tasks)
        worker.peer = peer = Peer(str(directory), "env-0", worker.handle)
        reply = [*chat.encode(answer), chat.eos_ids[0]]
        worker.manager = EnvManager(
            Config(), make=make, policy=ScriptedPolicy(lambda prompt, seed: reply), grants=worker, chat=chat
        )
        receiving = [tasks.create_task(bus.run()), tasks.create_task(peer.run())]
        peer.notify("controller", Cancel(groups=[]))  # the router learns the worker's name
        async with asyncio.timeout(20):
            yield controller, bus
        worker.close()
        for task in receiving:
            task.cancel()
    peer.close()
    bus.close()


async def test_a_group_is_played_and_its_tokens_can_be_read(tmp_path: Path) -> None:
    async with working(tmp_path, Quick) as (controller, bus):
        await asyncio.sleep(0.05)
        await bus.request("env-0", job(1), timeout_s=10)
        played = await controller.generated.get()
    assert [episode.reward for episode in played.episodes] == [1.0, 1.0]
    assert played.ref is not None
    assert [sample.episode for sample in PayloadReader(tmp_path).read(played.ref)] == [0, 1]


async def test_an_environment_that_cannot_be_built_is_reported(tmp_path: Path) -> None:
    async with working(tmp_path, Unbuildable) as (controller, bus):
        await asyncio.sleep(0.05)
        for attempt in range(3):
            await bus.request("env-0", job(1, attempt=attempt), timeout_s=10)
            played = await controller.generated.get()
            assert {episode.status for episode in played.episodes} == {"failed"}
            assert "no sandbox left" in str(played.episodes[0].error)


async def test_a_grant_after_the_cancel_hurts_nobody(tmp_path: Path) -> None:
    async with working(tmp_path, Quick, answer="a long answer") as (controller, bus):
        await asyncio.sleep(0.05)
        await bus.request("env-0", job(1, grant=2), timeout_s=10)
        waiting = [(await controller.requests.get()).episode for _ in range(2)]
        bus.broadcast(Cancel(groups=[1]))
        await asyncio.sleep(0.05)
        for episode in waiting:
            await bus.request("env-0", Grant(grant=SegmentGrant(episode=episode, max_tokens=2)), timeout_s=10)
        await bus.request("env-0", job(2), timeout_s=10)
        assert (await controller.generated.get()).group == 2
