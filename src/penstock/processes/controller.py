"""The controller: control bus, scheduler, ledger and pool index around `penstock.loop`. Never imports torch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path

from penstock import loop
from penstock.config import Config, ConfigError, load_config
from penstock.control.bus import Bus
from penstock.control.messages import (
    AnyMessage,
    DataGenerated,
    EpisodesEnded,
    GrantRequest,
    Heartbeat,
    Hello,
    Refused,
    TaskRequest,
    Welcome,
)
from penstock.control.remote import RemoteTrainer, RemoteWorkers
from penstock.data.sources import TaskStream, open_source
from penstock.deadline import Stalled
from penstock.observe.recorder import Recorder
from penstock.observe.trackers import open_trackers
from penstock.ports import TaskSource
from penstock.rollout.servers import Servers
from penstock.scheduler.foresight import Background
from penstock.scheduler.scheduler import Scheduler
from penstock.store.index import PoolIndex
from penstock.store.pool import ExperiencePool
from penstock.supervisor.child import Child
from penstock.supervisor.run_directory import publishable
from penstock.types import EVAL_TAG, NO_VERSION, TRAIN_TAG, Task

LEARNT_GROUPS = 20_000
"""Of another run: enough for any predictor, and no more than a minute of reading."""


class Controller:
    """Answers the bus; knows who has joined."""

    def __init__(self, config: Config, nonce: str, recorder: Recorder) -> None:
        self._nonce, self._recorder = nonce, recorder
        self.system: loop.System | None = None
        self._expected = {f"rollout-{i}" for i in range(config.rollout.num_servers)} | {"trainer-0"}
        self._urls: dict[str, str] = {}
        self._capacities: dict[str, int] = {}
        """Environment workers that asked for work before there was any."""
        self.servers_and_trainer = asyncio.Event()

    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        match message:
            case Hello():
                return self._welcome(message)
            case Heartbeat(name=name, cpu_s=cpu_s, busy_s=busy_s, counters=counters, spans=spans):
                self._recorder.heartbeat(name, cpu_s=cpu_s, busy_s=busy_s, counters=counters, spans=spans)
            case TaskRequest(worker=worker, capacity=capacity):
                self._capacities[worker] = capacity
                self._admit_workers()
            case GrantRequest() as grant if self.system:
                self.system.scheduler.request_grant(
                    grant.episode, unfinished=grant.unfinished, num_tokens=grant.num_tokens, saved=grant.saved
                )
            case EpisodesEnded(group=group, episodes=episodes, saved=saved) if self.system:
                self.system.scheduler.ended(group, episodes, saved)
            case DataGenerated(group=group, ref=ref, episodes=episodes) if self.system:
                loop.collect(self.system, group, ref, episodes)
            case _:
                raise ValueError(f"{peer} sent an unexpected {type(message).__name__}")
        return None

    def _welcome(self, hello: Hello) -> AnyMessage:
        if hello.nonce != self._nonce:
            return Refused(reason=f"{hello.name} belongs to another run")
        self._recorder.joined(hello.name, hello.role)
        if hello.url:
            self._urls[hello.name] = hello.url
        self._expected.discard(hello.name)
        if not self._expected:
            self.servers_and_trainer.set()
        return Welcome(server_urls=self.server_urls)

    @property
    def server_urls(self) -> list[str]:
        return [self._urls[name] for name in sorted(self._urls)]

    async def all_joined(self, timeout_s: float) -> None:
        """Until all servers and the trainer have; names who has not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.servers_and_trainer.wait()
        except TimeoutError:
            missing = ", ".join(sorted(self._expected))
            raise Stalled(waiter="controller", resource="all to join", holder=missing, seconds=timeout_s) from None

    def attach(self, system: loop.System) -> None:
        """The system is complete: from now on workers get work."""
        self.system = system
        self._admit_workers()

    def _admit_workers(self) -> None:
        if self.system:
            for worker, capacity in self._capacities.items():
                self.system.scheduler.worker_joined(worker, capacity)
            self._capacities.clear()


async def serve(child: Child) -> None:
    config = load_config(child.run_dir / "config.yaml")
    stop = child.stop_event()
    trackers = open_trackers(config.observe.trackers, child.run_dir, publishable(config))
    recorder = Recorder(child.run_dir, trackers)
    controller = Controller(config, child.nonce, recorder)
    bus = Bus(str(child.runtime_dir), controller.handle)
    child.report_ready()
    try:
        async with asyncio.TaskGroup() as tasks:
            receiving = tasks.create_task(bus.run())
            working = tasks.create_task(work(child, config, controller, bus, recorder))
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait([working])
                if controller.system:
                    await conclude(controller.system)
            receiving.cancel()
    finally:
        bus.close()
        recorder.close()
        if controller.system:
            controller.system.pool.close()


async def work(child: Child, config: Config, controller: Controller, bus: Bus, recorder: Recorder) -> None:
    """Build the system while the other processes load their models, then run it."""
    train = await asyncio.to_thread(open_source, config.data, seed=config.seed, tag=TRAIN_TAG)
    held_out_source = open_source(config.data, seed=config.seed, tag=EVAL_TAG)
    tasks = (held_out_source.task(index) for index in range(config.data.eval_tasks))
    held_out = [task for task in tasks if task is not None]
    await controller.all_joined(config.supervisor.ready_timeout_s)
    timeout_s = config.rollout.request_timeout_s
    beside = asyncio.TaskGroup()
    workers = RemoteWorkers(bus, beside, timeout_s=timeout_s)
    servers = Servers(
        controller.server_urls,
        engine=config.rollout.engine,
        update_mode=config.rollout.update_mode,
        api_key=config.rollout.control_key,
        timeout_s=timeout_s,
        lost=lambda url, why: recorder.event("server_lost", url=url, why=why),
    )
    system = loop.System(
        config=config,
        run_dir=child.run_dir,
        scheduler=Scheduler(
            config, now=asyncio.get_running_loop().time, record=recorder.decision, background=in_thread(beside)
        ),
        tasks=TaskStream(train, held_out=held_out),
        held_out=held_out,
        workers=workers,
        trainer=RemoteTrainer(bus, "trainer-0", timeout_s=max(timeout_s, 600.0)),
        servers=servers,
        pool=ExperiencePool(child.run_dir / "pool"),
        recorder=recorder,
    )
    if config.scheduler.length.learn_from is not None:
        played = played_before(Path(config.scheduler.length.learn_from), train, max_groups=LEARNT_GROUPS)
        await asyncio.to_thread(system.scheduler.recall, played)
        recorder.event("lengths_learnt", groups=len(played), run=config.scheduler.length.learn_from)
    if config.rollout.urls:
        await servers.forget_weights()
    controller.attach(system)
    try:
        async with beside:
            await loop.run(system)
            workers.close()
    finally:
        await servers.close()


def played_before(run_dir: Path, source: TaskSource, *, max_groups: int) -> list[tuple[Task, list[int]]]:
    """The latest groups that another run on the same data played: (task, response tokens of its members)."""
    if not (run_dir / "pool" / "index").exists():
        raise ConfigError(f"scheduler.length.learn_from: {run_dir} is not the directory of a run: it has no pool/index")
    index = PoolIndex(run_dir / "pool")
    try:
        records = deque(index, maxlen=max_groups)
    finally:
        index.close()
    return [
        (task, [episode.response_tokens for episode in record.episodes])
        for record in records
        if (task := source.task(record.task_index)) is not None and task.task_id == record.task_id
    ]


def in_thread(tasks: asyncio.TaskGroup) -> Background:
    """Length predictors are fitted beside the event loop."""

    async def fit(compute: Callable[[], object], use: Callable[[object], None]) -> None:
        use(await asyncio.to_thread(compute))

    def start(compute: Callable[[], object], use: Callable[[object], None]) -> None:
        fitting = fit(compute, use)
        try:
            tasks.create_task(fitting)
        except RuntimeError:  # the run has ended: nobody needs better predictions any more
            fitting.close()

    return start


async def conclude(system: loop.System) -> None:
    """A stop was asked for: give up what is in flight, keep what was learned."""
    if system.stepping:
        await asyncio.wait([system.stepping])
    loop.cancel_rest(system)
    if system.scheduler.policy_version != NO_VERSION:
        await loop.checkpoint(system)
    system.recorder.event("stopped", step=system.num_steps, ledger=system.scheduler.ledger.counts())
