"""Environment workers on a real bus, and a controller that only listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_ports import leased
from scripted_policy import ScriptedPolicy

from penstock.config import Config, TinyModelConfig
from penstock.control.bus import Bus, Peer
from penstock.control.messages import (
    AnyMessage,
    DataGenerated,
    EpisodesGenerated,
    Grant,
    GrantRequest,
    Hello,
    NewTask,
    RewardComputed,
    Welcome,
)
from penstock.envs.manager import EnvManager, MakeEnvironment
from penstock.envs.rewards.scorer import Scorers
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.ports.work import PartialRollout
from penstock.processes.env_worker import Worker
from penstock.processes.pool_access import WorkerPool
from penstock.store.payload_files import PayloadReader, PayloadWriter
from penstock.types import Sampling, SegmentGrant, Task


class Quick:
    """One turn, reward 1."""

    def __init__(self, task: Task) -> None:
        pass

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"say {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, True, False, {}


@dataclass(slots=True)
class Controller:
    """Collects what workers send, in order too."""

    generated: asyncio.Queue[DataGenerated] = field(default_factory=asyncio.Queue)
    generating_ended: asyncio.Queue[EpisodesGenerated] = field(default_factory=asyncio.Queue)
    ended: asyncio.Queue[RewardComputed] = field(default_factory=asyncio.Queue)
    requests: asyncio.Queue[GrantRequest] = field(default_factory=asyncio.Queue)
    reports: list[str] = field(default_factory=list)

    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        self.reports.append(type(message).__name__)
        match message:
            case Hello():
                return Welcome(server_urls=[])
            case DataGenerated():
                self.generated.put_nowait(message)
            case EpisodesGenerated():
                self.generating_ended.put_nowait(message)
            case RewardComputed():
                self.ended.put_nowait(message)
            case GrantRequest():
                self.requests.put_nowait(message)
        return None


def job(
    group: int,
    *,
    members: Sequence[int] = (0, 1),
    group_size: int = 2,
    redundancy: int = 0,
    attempt: int = 0,
    grant: int = 8,
    max_new_tokens: int = 8,
    saved: Sequence[PartialRollout] = (),
) -> NewTask:
    work = leased(
        members,
        group=group,
        group_size=group_size,
        redundancy=redundancy,
        attempt=attempt,
        max_tokens=grant,
        sampling=Sampling(max_new_tokens=max_new_tokens),
        env_seed=1,
        deadline_s=60.0,
        saved=saved,
    )
    return NewTask(work=work)


@dataclass(slots=True, kw_only=True)
class Stage:
    """A bus with workers on it; all share one policy and one pool."""

    directory: Path
    controller: Controller
    bus: Bus
    chat: ChatTokenizer
    policy: ScriptedPolicy
    make: MakeEnvironment
    config: Config
    tasks: asyncio.TaskGroup
    workers: dict[str, Worker] = field(default_factory=dict)
    peers: dict[str, tuple[Peer, asyncio.Task[None]]] = field(default_factory=dict)

    async def join(self, name: str) -> None:
        """A worker starts; the bus knows it when this returns."""
        worker = Worker(
            self.config,
            name,
            WorkerPool(PayloadWriter(self.directory, name), PayloadReader(self.directory)),
            self.tasks,
        )
        peer = Peer(str(self.directory), name, worker.handle)
        scorers = Scorers(self.config)
        manager = EnvManager(
            self.config, make=self.make, policy=self.policy, grants=worker, chat=self.chat, scorers=scorers
        )
        worker.player, worker.counts = manager, manager.counts
        self.workers[name] = worker
        self.peers[name] = peer, self.tasks.create_task(peer.run())
        hello = Hello(role="env", name=name, nonce="", pid=0)
        await worker.welcomed(peer, await peer.join(hello, timeout_s=60))

    def kill(self, name: str) -> None:
        """A worker ends in the middle of whatever it does."""
        self.workers.pop(name).close()
        peer, receiving = self.peers.pop(name)
        receiving.cancel()
        peer.close()

    async def start(self, name: str, job: NewTask) -> None:
        await self.bus.request(name, job, timeout_s=60)

    async def tell(self, name: str, message: AnyMessage) -> None:
        await self.bus.request(name, message, timeout_s=60)

    async def grant(self, name: str, request: GrantRequest, max_tokens: int) -> None:
        """Grant what was asked for."""
        await self.tell(name, Grant(grant=SegmentGrant(episode=request.episode, max_tokens=max_tokens)))


@asynccontextmanager
async def working(
    directory: Path,
    make: MakeEnvironment = Quick,
    answer: str | Callable[[list[int], int], list[int]] = "ok",
    *,
    config: Config | None = None,
) -> AsyncIterator[Stage]:
    """A stage with the worker `env-0`, whose policy always gives `answer`, or what it returns."""
    write_tiny_model(directory / "model", TinyModelConfig(), 512)
    chat = ChatTokenizer.load(directory / "model")
    policy = ScriptedPolicy(answer if callable(answer) else lambda _, __: [*chat.encode(answer), chat.eos_ids[0]])
    controller = Controller()
    bus = Bus(str(directory), controller.handle, nonce="")
    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        stage = Stage(
            directory=directory,
            controller=controller,
            bus=bus,
            chat=chat,
            policy=policy,
            make=make,
            config=config or Config(),
            tasks=tasks,
        )
        receiving = tasks.create_task(bus.run())
        await stage.join("env-0")
        yield stage
        for name in list(stage.workers):
            stage.kill(name)
        receiving.cancel()
    bus.close()
