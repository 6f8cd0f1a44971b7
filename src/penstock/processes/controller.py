"""The controller: control bus, scheduler, ledger and pool index around `penstock.loop`. Never imports torch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from penstock import loop
from penstock.config import Config, ConfigError, load_config
from penstock.control.bus import CONTROLLER, Bus, UnknownPeer
from penstock.control.messages import (
    AnyMessage,
    DataGenerated,
    EpisodesEnded,
    EpisodesGenerated,
    Goodbye,
    GrantRequest,
    Heartbeat,
    Hello,
    Refused,
    ServersChanged,
    StallReport,
    TaskRequest,
    Welcome,
)
from penstock.control.remote import RemoteTrainer, RemoteWorkers
from penstock.data.sources import FirstTasks, MixedTasks, TaskStream, held_out_tasks, open_tasks
from penstock.deadline import Stall, Stalled, deadline, patient, reporting_to, write_to_log
from penstock.observe.recorder import Recorder
from penstock.observe.trackers import open_trackers
from penstock.ports import TaskSource, TrainerLost
from penstock.processes.attached import AttachedWorkers
from penstock.processes.dumping import open_dumps
from penstock.processes.gathering import Gathering
from penstock.processes.pool import pool_of_controller
from penstock.recovery import LEARNT_GROUPS
from penstock.rollout.servers import Servers
from penstock.rollout.session import RolloutError
from penstock.scheduler.foresight import Background
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.seeds import COLLIDES
from penstock.store.index import PoolIndex
from penstock.store.pool import ExperiencePool
from penstock.supervisor.child import Child, leaf
from penstock.supervisor.record import read_state
from penstock.supervisor.run_directory import publishable
from penstock.supervisor.states import ProcessState
from penstock.system import System
from penstock.types import NO_VERSION, PayloadRef, Task

PIPELINES = {"train": loop.run, "eval": loop.evaluate_only, "rollout": loop.synthesize}
LOOK_EVERY_S = 1.0
"""Between two looks for attached workers that have gone silent, or a trainer that has died while the run ends."""
TRAINER = "trainer-0"
DEAD = (ProcessState.EXITED, ProcessState.BACKOFF, ProcessState.FATAL)
BRING_UP_AGAIN_S = 5.0
KILL_S = 60.0
"""A process that hangs is killed and started again before whoever waits for it gives up."""
JOINING = 2.0
"""Times what a process has to get ready: the supervisor, which sees why one does not, gives up first."""
DATA_S = 1800.0
"""For opening the tasks, or learning from another run's: files of any size, perhaps over a network."""
FIT_S = 300.0
"""For fitting a length predictor, before it is worth a report."""


class Controller:
    """Answers the bus; knows who has joined, and what it means that somebody joins again."""

    def __init__(self, config: Config, child: Child, recorder: Recorder) -> None:
        self._child, self._recorder = child, recorder
        self.pool_dir, payloads = pool_of_controller(child)
        self._gathering = Gathering(payloads, recorder)
        self._num_messages = 0
        self.bus = Bus(str(child.runtime_dir), self.handle, host=child.address)
        self.system: System | None = None
        self._joining_s = JOINING * config.supervisor.ready_timeout_s
        self._expected = {f"rollout-{i}" for i in range(config.rollout.num_servers)}
        self._expected |= {TRAINER} if config.has_trainer else set()
        self._members: dict[str, Hello] = {}
        self._capacities: dict[str, int] = {}
        """Environment workers that asked for work before there was any."""
        self.servers_and_trainer = asyncio.Event()
        self.server_is_back: Callable[[str], None] = lambda url: None
        self._attached = AttachedWorkers(config, child.run_dir, recorder, now=asyncio.get_running_loop().time)

    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        self._num_messages += 1
        self._child.pulse(self._num_messages, "the run" if self.system else "")
        if isinstance(message, Hello):
            if message.role == "env":  # it is told where all servers are
                await self.all_joined()
            return self._welcome(message)
        if self._attached.has_departed(peer):
            return None
        if peer not in self._members:
            raise UnknownPeer(peer)
        self._attached.hear(peer)
        match message:
            case Heartbeat(name=name, cpu_s=cpu_s, busy_s=busy_s, counters=counters, spans=spans):
                self._recorder.heartbeat(name, cpu_s=cpu_s, busy_s=busy_s, counters=counters, spans=spans)
            case Goodbye(name=name):
                self._attached.depart(name)
                self._lose(name)
            case TaskRequest(worker=worker, capacity=capacity):
                self._capacities[worker] = capacity
                self._admit_workers()
            case GrantRequest() as grant if self.system:
                self.system.scheduler.request_grant(
                    grant.episode, unfinished=grant.unfinished, num_tokens=grant.num_tokens, saved=grant.saved
                )
                await self._gather(peer, [grant.saved])
            case EpisodesGenerated(episodes=members, num_tokens=num_tokens) if self.system:
                self.system.scheduler.generated(members, num_tokens)
            case EpisodesEnded(group=group, episodes=episodes, saved=saved) if self.system:
                lost = await self._gather(peer, saved)
                self.system.scheduler.ended(group, episodes, [None] * len(saved) if lost else saved)
                self.system.settle()
            case DataGenerated() as played if self.system:
                await self._collect(self.system, peer, played)
            case StallReport(stall=stall):
                self._recorder.event("stall", process=peer, **asdict(stall))
            case _:
                raise ValueError(f"{peer} sent an unexpected {type(message).__name__}")
        return None

    async def _collect(self, system: System, worker: str, played: DataGenerated) -> None:
        """A group was played; its tokens are here before it counts as such."""
        if why := await self._gather(worker, [played.ref]):
            system.scheduler.tokens_lost(played.group, played.episodes[0].episode.attempt, why)
        else:
            loop.collect(system, played.group, played.ref, played.episodes)

    async def _gather(self, worker: str, refs: Sequence[PayloadRef | None]) -> str:
        """Returns why they cannot be had, or nothing."""
        records = [ref for ref in refs if ref is not None]
        if not records:
            return ""
        return await self._gathering.gather(records, worker=worker, host=self._members[worker].host)

    def _welcome(self, hello: Hello) -> AnyMessage:
        if hello.nonce != self._child.nonce:
            return Refused(reason=f"{hello.name} belongs to another run")
        before = self._members.get(hello.name)
        self._members[hello.name] = hello
        self._recorder.joined(hello.name, hello.role, url=hello.url)
        if before is not None:
            self._joined_again(before, hello)
        if hello.attached:
            self._attached.join(hello.name)
        elif hello.role == "env" and self._child.address is not None:
            self._attached.watch(hello.name)
        self._expected.discard(hello.name)
        if not self._expected:
            self.servers_and_trainer.set()
        return Welcome(server_urls=self.server_urls, host=self._child.host)

    def _joined_again(self, before: Hello, hello: Hello) -> None:
        """Another process under the same name, or one that has forgotten what it was given."""
        if (hello.pid, hello.host) != (before.pid, before.host):
            self.bus.forget(hello.name)
        if hello.role == "env":
            self._capacities.pop(hello.name, None)
            if self.system is not None:
                self.system.scheduler.worker_lost(hello.name)
        elif hello.role == "rollout" and self.system is not None:
            self.server_is_back(hello.url)

    async def watch_attached(self) -> NoReturn:
        """Notice when workers that nobody supervises are gone."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for name in self._attached.lose_silent():
                self._lose(name)

    def _lose(self, worker: str) -> None:
        """An attached worker is gone; should it live, it is asked who it is as soon as it says something."""
        del self._members[worker]
        self._capacities.pop(worker, None)
        self.bus.forget(worker)
        if self.system is not None:
            self.system.scheduler.worker_lost(worker)

    @property
    def env_workers(self) -> list[str]:
        return [name for name, hello in self._members.items() if hello.role == "env"]

    @property
    def server_urls(self) -> list[str]:
        return [self._members[name].url for name in sorted(self._members) if self._members[name].url]

    async def all_joined(self) -> None:
        """Until all servers and the trainer have; names who has not."""
        async with deadline(
            self._joining_s,
            waiter="controller",
            resource="all to join",
            holder=lambda: ", ".join(sorted(self._expected)),
        ):
            await self.servers_and_trainer.wait()

    def note(self, stall: Stall) -> None:
        """This very process waits."""
        write_to_log(stall)
        self._recorder.event("stall", process=CONTROLLER, **asdict(stall))

    def close(self) -> None:
        """Nothing more is asked of others."""
        self._gathering.close()

    def attach(self, system: System) -> None:
        """The system is complete: from now on workers get work."""
        self.system = system
        self._admit_workers()
        self._attached.ask_for_some()

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
    controller = Controller(config, child, recorder)
    bus = controller.bus
    child.report_ready()
    try:
        with reporting_to(controller.note):
            async with asyncio.TaskGroup() as tasks:
                receiving = tasks.create_task(bus.run())
                watching = tasks.create_task(controller.watch_attached())
                working = tasks.create_task(work(child, config, controller, recorder))
                stopping = asyncio.create_task(stop.wait())
                await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
                stopping.cancel()
                if not working.done():
                    working.cancel()
                    await asyncio.wait([working])
                    if controller.system:
                        await conclude(controller.system)
                watching.cancel()
                receiving.cancel()
    finally:
        bus.close()
        controller.close()
        recorder.close()
        if controller.system:
            controller.system.pool.close()


async def work(child: Child, config: Config, controller: Controller, recorder: Recorder) -> None:
    """Build the system while the other processes load their models, then run it."""
    async with deadline(DATA_S, waiter="controller", resource="the tasks", holder="their source"):
        found = await asyncio.to_thread(open_tasks, config)
        held_out = await asyncio.to_thread(held_out_tasks, config)
        train = found if config.pipeline != "rollout" else tasks_to_play(config, found, recorder)
        tasks, pool = TaskStream(train, held_out=held_out), ExperiencePool(controller.pool_dir)
        dumps = await asyncio.to_thread(open_dumps, config, child.run_dir, pool, tasks, recorder.event)
    await controller.all_joined()
    timeout_s, supervisor = config.rollout.request_timeout_s, config.supervisor
    beside = asyncio.TaskGroup()
    workers = RemoteWorkers(controller.bus, beside, timeout_s=max(timeout_s, supervisor.silent_s + KILL_S))
    servers = Servers(
        controller.server_urls,
        engine=config.rollout.engine,
        update_mode=config.rollout.update_mode,
        api_key=config.rollout.control_key,
        timeout_s=timeout_s,
        lost=lambda url, why: recorder.event("server_lost", url=url, why=why),
    )
    system = System(
        config=config,
        run_dir=child.run_dir,
        scheduler=Scheduler(
            config, now=asyncio.get_running_loop().time, record=recorder.decision, background=in_thread(beside)
        ),
        tasks=tasks,
        held_out=held_out,
        workers=workers,
        trainer=RemoteTrainer(controller.bus, TRAINER, timeout_s=max(timeout_s, supervisor.hang_s + KILL_S)),
        servers=servers,
        pool=pool,
        recorder=recorder,
        dumps=dumps,
    )
    if config.scheduler.length.learn_from is not None:
        played = played_before(Path(config.scheduler.length.learn_from), train, max_groups=LEARNT_GROUPS)
        async with deadline(
            DATA_S, waiter="controller", resource="lengths to learn from", holder="the length predictor"
        ):
            await asyncio.to_thread(system.scheduler.recall, played)
        recorder.event("lengths_learnt", groups=len(played), run=config.scheduler.length.learn_from)
    if config.env.seeds == "arithmetic":
        recorder.event("alarm", reason=COLLIDES)
    controller.server_is_back = lambda url: start(beside, bring_back(url, controller, servers, workers, recorder))
    servers.set_urls(controller.server_urls)  # one may have been started anew meanwhile
    controller.attach(system)
    try:
        if config.rollout.urls and config.has_trainer:
            await servers.forget_weights()
        async with beside:
            for dump in dumps:
                start(beside, dump.run())
            await PIPELINES[config.pipeline](system)
            workers.close()
    finally:
        await servers.close()


def tasks_to_play(config: Config, source: MixedTasks, recorder: Recorder) -> TaskSource:
    """As many as `synthesis.tasks` says; how many these are is told."""
    wanted, size = config.synthesis.tasks, source.size
    if wanted < 0 and size is None:
        tags = ", ".join(tag for tag, each in config.environments.train.items() if each.data.is_endless)
        raise ConfigError(f"synthesis.tasks: the tasks of {tags} have no end: say how many are to be played")
    num_tasks = min(number for number in (wanted if wanted >= 0 else size, size) if number is not None)
    recorder.intends(num_tasks)
    return FirstTasks(source, num_tasks)


async def bring_back(
    url: str, controller: Controller, servers: Servers, workers: RemoteWorkers, recorder: Recorder
) -> None:
    """A rollout server was started anew: all hear of it, and it gets the weights that the others serve; if that fails,
    once more after a while, as long as it is there."""
    servers.set_urls(controller.server_urls)
    workers.tell(controller.env_workers, ServersChanged(server_urls=controller.server_urls))
    while url in controller.server_urls:
        try:
            await servers.bring_up(url)
            recorder.event("server_back", url=url)
            return
        except (RolloutError, Stalled) as error:
            recorder.event("server_lost", url=url, why=str(error))
        await asyncio.sleep(BRING_UP_AGAIN_S)


def start(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> None:
    """Beside the loops, unless the run has ended meanwhile."""
    try:
        tasks.create_task(work)
    except RuntimeError:
        work.close()


def played_before(run_dir: Path, source: TaskSource, *, max_groups: int) -> list[tuple[Task, list[int]]]:
    """The latest groups that another run on the same data played: (task, response tokens of its members)."""
    if not (run_dir / "pool" / "index").exists():
        raise ConfigError(f"scheduler.length.learn_from: {run_dir} is not the directory of a run: it has no pool/index")
    index = PoolIndex(run_dir / "pool", readonly=True)
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
        with patient(FIT_S, waiter="controller", resource="new predictions", holder="the length predictor"):
            use(await asyncio.to_thread(compute))

    return lambda compute, use: start(tasks, fit(compute, use))


async def conclude(system: System) -> None:
    """A stop was asked for: keep what was learned, if anything was to be. What is in flight is played again when the
    run is resumed."""
    if system.config.pipeline == "eval":
        system.recorder.event("stopped", step=system.num_steps, ledger=system.scheduler.evaluations.counts())
        return
    if system.config.pipeline == "rollout":
        loop.show(system)
        system.recorder.event("stopped", step=system.scheduler.num_ended, ledger=system.scheduler.ledger.counts())
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(raise_if_dead(system.run_dir, TRAINER))
            await save_last(system)
            watching.cancel()
    except* TrainerLost as lost:
        system.recorder.event("checkpoint_missed", step=system.num_steps, reason=str(leaf(lost)))
    system.recorder.event("stopped", step=system.num_steps, ledger=system.scheduler.ledger.counts())


async def save_last(system: System) -> None:
    """Raises `TrainerLost`."""
    if system.stepping:
        await asyncio.wait([system.stepping])
    is_unsaved = system.scheduler.policy_version != NO_VERSION and not system.is_saved
    if is_unsaved and (await system.trainer.state()).step == system.num_steps:  # else it has just gone back
        await loop.checkpoint(system)


async def raise_if_dead(run_dir: Path, trainer: str) -> NoReturn:
    """Of a run that is ending nobody is started again. Raises `TrainerLost` as soon as the supervisor knows."""
    while True:
        state = ((read_state(run_dir) or {}).get("processes", {}).get(trainer, {})).get("state")
        if state in DEAD:
            raise TrainerLost(f"{trainer} is dead")
        await asyncio.sleep(LOOK_EVERY_S)
