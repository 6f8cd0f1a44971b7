"""The controller: control bus, scheduler, ledger and pool index around `penstock.loop`. Never imports torch."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from penstock import loop
from penstock.config import Config, ConfigError, load_config
from penstock.control import messages
from penstock.control.bus import CONTROLLER, Bus, ProtocolViolation, UnknownPeer
from penstock.control.messages import AnyMessage
from penstock.control.remote_workers import RemoteTrainer, RemoteWorkers
from penstock.control.runtime_files import ServerKeys
from penstock.data.sources import FirstTasks, MixedTasks, TaskStream, held_out_tasks, open_tasks
from penstock.deadline import Stall, Stalled, alongside, deadline, first, reporting_to, warn_if_stalled, write_to_log
from penstock.observe.recorder import Recorder
from penstock.observe.trackers import Trackers
from penstock.ports.environment import TaskSource
from penstock.ports.training import TrainerLost
from penstock.processes.bus_client import COSTS
from penstock.processes.dumping import open_dumps
from penstock.processes.layout import TRAINER, roles_by_name
from penstock.processes.pool_access import PayloadFetcher, pool_of_controller
from penstock.processes.report_checks import check_alone, check_in_run, episodes_of
from penstock.processes.run_metrics import metrics_endpoint
from penstock.processes.searching import ProcessSearcher
from penstock.processes.visible import direct_way
from penstock.processes.worker_registry import WorkerRegistry
from penstock.recovery import MAX_LEARNED_GROUPS
from penstock.rollout.servers import Backoff, Servers
from penstock.rollout.session import RolloutError
from penstock.scheduler.leases import COLLIDES
from penstock.scheduler.length_prediction import Background
from penstock.scheduler.scheduler import Scheduler
from penstock.store.experience_pool import ExperiencePool
from penstock.store.index import read_groups
from penstock.supervisor.child import Child, leaf
from penstock.supervisor.run_directory import publishable, tracker_identity
from penstock.supervisor.run_journal import read_state
from penstock.supervisor.states import ProcessState
from penstock.system import System
from penstock.types import NO_VERSION, PayloadRef, Task

PIPELINES = {"train": loop.run, "eval": loop.evaluate_only, "rollout": loop.synthesize}
LOOK_EVERY_S = 1.0
"""Interval between two checks for silent attached workers, or for a dead trainer while the run ends."""
DEAD = (ProcessState.EXITED, ProcessState.BACKOFF, ProcessState.FATAL)
BRING_UP_AGAIN_S = 5.0
KILL_S = 60.0
"""Time for the supervisor to kill and restart a hung process before the requests that wait for it time out."""
JOINING = 2.0
"""Multiple of the ready timeout for all processes to join. The supervisor's own timeout comes first, because the
supervisor can say why a process is not ready."""
DATA_S = 1800.0
"""Limit for opening the tasks, or for learning lengths from another run. The files may be large, and on a network."""
END_TRACKERS_S = 45.0
"""Limit for the trackers to end; they end by themselves before."""
FIT_S = 300.0
"""Seconds that fitting a length predictor may take before a stall is reported."""


class Controller:
    """Handles bus messages and tracks which processes have joined, and which have joined again."""

    def __init__(self, config: Config, child: Child, recorder: Recorder) -> None:
        self._child, self._recorder = child, recorder
        self.pool_dir, payloads = pool_of_controller(child)
        self._fetcher = PayloadFetcher(payloads, recorder)
        self._num_messages = 0
        self._roles = roles_by_name(config)
        runtime_dir, nonce, dropped = str(child.runtime_dir), child.secret("greeting"), recorder.frames_dropped
        self.bus = Bus(runtime_dir, self.handle, nonce=nonce, host=child.address, dropped=dropped)
        supervisor, timeout_s = config.supervisor, config.rollout.request_timeout_s
        self.trainer = RemoteTrainer(self.bus, TRAINER, timeout_s=max(timeout_s, supervisor.hang_s + KILL_S))
        self.system: System | None = None
        self._joining_s = JOINING * config.supervisor.ready_timeout_s
        self._expected = {f"rollout-{i}" for i in range(config.num_servers)}
        self._expected |= {TRAINER} if config.has_trainer else set()
        self._members: dict[str, messages.Hello] = {}
        self._capacities: dict[str, int] = {}
        """Capacity of each environment worker that asked for work before the system was ready, in episodes."""
        self.servers_and_trainer = asyncio.Event()
        if not self._expected:  # another policy than the run's own model plays
            self.servers_and_trainer.set()
        self.server_is_back: Callable[[str], None] = lambda url: None
        self._registry = WorkerRegistry(config, child.run_dir, recorder, now=asyncio.get_running_loop().time)

    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        self._num_messages += 1
        self._child.pulse(self._num_messages, "the run" if self.system else "")
        if isinstance(message, messages.Hello):
            if message.role == "env":  # the welcome tells the worker the URLs of all servers
                await self.all_joined()
            return self._welcome(message)
        if self._registry.has_left(peer):
            return None
        if peer not in self._members:
            raise UnknownPeer(peer)
        self._registry.hear(peer)
        self._check(peer, message)
        match message:
            case messages.Heartbeat(progress=progress, cpu_s=cpu_s, busy_s=busy_s, counters=counters, spans=spans):
                if peer == TRAINER:
                    self.trainer.heard(progress)
                self._recorder.heartbeat(peer, cpu_s=cpu_s, busy_s=busy_s, counters=counters, spans=spans)
            case messages.Goodbye():
                self._registry.leave(peer)
                self._remove_worker(peer)
            case messages.TaskRequest(capacity=capacity):
                self._capacities[peer] = capacity
                self._add_workers()
            case messages.GrantRequest(episode=episode, saved=saved) as request if self.system:
                self.system.scheduler.members.request_grant(
                    episode.group_attempt,
                    episode.episode,
                    unfinished=request.unfinished,
                    num_tokens=request.num_tokens,
                    saved=saved,
                )
                await self._fetch(peer, [saved])
            case messages.EpisodesGenerated(episodes=[first, *_] as episodes, num_tokens=num_tokens) if self.system:
                members = [episode.episode for episode in episodes]
                self.system.scheduler.members.finish_generation(first.group_attempt, members, num_tokens[0])
            case messages.RewardComputed(episodes=[first, *_] as episodes, saved=saved) if self.system:
                lost = await self._fetch(peer, saved)
                attempt = first.episode.group_attempt
                self.system.scheduler.members.end_members(attempt, episodes, [None] * len(saved) if lost else saved)
                self.system.update_pool()
            case messages.DataGenerated(group=group, ref=ref, episodes=episodes) if self.system:
                if reason := await self._fetch(peer, [ref]):  # its tokens are lost, so the group starts again
                    self.system.scheduler.reissue_group(episodes[0].episode.group_attempt, reason)
                else:
                    loop.collect(self.system, group, ref, episodes)
            case messages.StallReport(stall=stall):
                self._recorder.event("stall", process=peer, **asdict(stall))
            case _:
                raise ProtocolViolation("the controller did not expect it")
        return None

    def _check(self, peer: str, message: AnyMessage) -> None:
        """Check that the peer may send this message now. Raises `ProtocolViolation`."""
        check_alone(message, self._members[peer].role)
        if self.system is not None and episodes_of(message):
            check_in_run(message, peer, self.system.scheduler)

    async def _fetch(self, worker: str, refs: Sequence[PayloadRef | None]) -> str:
        """Fetch these records into the pool. Return the reason if that fails, else an empty string."""
        return await self._fetcher.fetch(refs, worker=worker, host=self._members[worker].host)

    def _welcome(self, hello: messages.Hello) -> AnyMessage:
        if self._roles.get(hello.name, "") != ("" if hello.attached else hello.role) or (
            hello.attached and hello.role != "env"
        ):
            return messages.Refused(reason=f"the run has no process {hello.name} with the role {hello.role}")
        before = self._members.get(hello.name)
        self._members[hello.name] = hello
        self._recorder.joined(hello.name, hello.role, url=hello.url)
        if before is not None:
            self._joined_again(before, hello)
        if hello.attached:
            self._registry.attach(hello.name)
        elif hello.role == "env" and self._child.address is not None:
            self._registry.watch(hello.name)
        self._expected.discard(hello.name)
        if not self._expected:
            self.servers_and_trainer.set()
        return messages.Welcome(server_urls=self.server_urls, host=self._child.host)

    def _joined_again(self, before: messages.Hello, hello: messages.Hello) -> None:
        """Handle a second join under one name: by a new process, or by a process that has forgotten its work."""
        if (hello.pid, hello.host) != (before.pid, before.host):
            self.bus.forget(hello.name)
        if hello.role == "env":
            self._capacities.pop(hello.name, None)
            if self.system is not None:
                self.system.scheduler.remove_worker(hello.name)
        elif hello.role == "rollout" and self.system is not None:
            self.server_is_back(hello.url)

    async def watch_registry(self) -> NoReturn:
        """Remove workers that no supervisor watches, when they are silent for too long."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for name in self._registry.remove_silent():
                self._remove_worker(name)

    def _remove_worker(self, worker: str) -> None:
        """Forget a worker that is gone. If it is alive after all, its next message makes the bus ask it to join
        again."""
        del self._members[worker]
        self._capacities.pop(worker, None)
        self.bus.forget(worker)
        if self.system is not None:
            self.system.scheduler.remove_worker(worker)

    @property
    def env_workers(self) -> list[str]:
        return [name for name, hello in self._members.items() if hello.role == "env"]

    @property
    def server_urls(self) -> list[str]:
        return [self._members[name].url for name in sorted(self._members) if self._members[name].url]

    async def all_joined(self) -> None:
        """Wait until all servers and the trainer have joined. A timeout names the missing processes."""
        async with deadline(
            self._joining_s,
            waiter="controller",
            resource="all servers and the trainer to join",
            holder=lambda: ", ".join(sorted(self._expected)),
        ):
            await self.servers_and_trainer.wait()

    def record_stall(self, stall: Stall) -> None:
        """Record a stall of the controller itself."""
        write_to_log(stall)
        self._recorder.event("stall", process=CONTROLLER, **asdict(stall))

    def attach(self, system: System) -> None:
        """Set the complete system. From now on workers get work."""
        self.system = system
        self._add_workers()
        self._registry.ask_for_worker()

    def _add_workers(self) -> None:
        if self.system:
            for worker, capacity in self._capacities.items():
                self.system.scheduler.add_worker(worker, capacity)
            self._capacities.clear()


async def serve(child: Child) -> None:
    config = load_config(child.run_dir / "config.yaml")
    stop = child.stop_event()
    child.log_start(
        pipeline=config.pipeline,
        environments=", ".join(config.environments.names),
        mode=config.scheduler.mode,
        max_staleness=config.scheduler.max_staleness,
        group_size=config.env.group_size,
        groups_per_step=config.trainer.groups_per_step,
        steps=config.trainer.steps,
        seed=config.seed,
    )
    recorder, trackers = Recorder(child.run_dir), open_trackers(child.run_dir, config)
    controller = Controller(config, child, recorder)
    rollout = config.rollout
    ServerKeys(api_key=rollout.api_key or "", admin_api_key=rollout.admin_api_key or "").write(child.runtime_dir)
    child.report_ready()
    try:
        with reporting_to(controller.record_stall):
            async with (
                metrics_endpoint(config, child.run_dir, recorder),
                alongside(controller.bus.run(), controller.watch_registry()),
                asyncio.TaskGroup() as tasks,
            ):
                working = tasks.create_task(work(child, config, controller, recorder))
                await first(stop.wait(), asyncio.wait([working]))
                if not working.done():
                    working.cancel()
                    await asyncio.wait([working])
                    if controller.system:
                        await conclude(controller.system)
    finally:
        controller.bus.close()
        recorder.close()
        with suppress(Stalled):  # trackers never fail a run
            async with deadline(END_TRACKERS_S, waiter="controller", resource="its trackers", holder="their libraries"):
                await asyncio.to_thread(trackers.close)
        child.totals = recorder.totals
        if controller.system:
            controller.system.pool.close()


def open_trackers(run_dir: Path, config: Config) -> Trackers:
    """Return the trackers of the run. They continue the tracker runs that state.json names."""
    return Trackers(
        config.observe.trackers,
        run_dir,
        identity=(read_state(run_dir) or {}).get("tracking") or tracker_identity(config, run_dir.name),
        uploads=config.observe.tracker_upload,
        axis="policy_version" if config.has_trainer else "step",
        config=publishable(config),
    )


async def work(child: Child, config: Config, controller: Controller, recorder: Recorder) -> None:
    """Build the system while the other processes load their models, then run it."""
    async with deadline(DATA_S, waiter="controller", resource="the tasks", holder="their source"):
        found = await asyncio.to_thread(open_tasks, config)
        held_out = await asyncio.to_thread(held_out_tasks, config)
        train = found if config.pipeline != "rollout" else tasks_to_play(config, found, recorder)
        tasks = TaskStream(train, held_out=held_out, warn=lambda reason: recorder.event("alarm", reason=reason))
        pool = await asyncio.to_thread(ExperiencePool, controller.pool_dir)
    await controller.all_joined()
    timeout_s, supervisor = config.rollout.request_timeout_s, config.supervisor
    beside = asyncio.TaskGroup()
    workers = RemoteWorkers(controller.bus, beside, timeout_s=max(timeout_s, supervisor.silent_s + KILL_S))
    servers = Servers(
        controller.server_urls,
        engine=config.rollout.engine,
        update_mode=config.rollout.update_mode,
        api_key=config.rollout.control_key,
        claim=child.secret("claim"),
        timeout_s=timeout_s,
        lost=lambda url, why: recorder.event("server_lost", url=url, why=why),
        keeps_weights=config.uses_given_weights,
        takes_turns=config.gives_devices,
        serves_adapters=config.engine_serves_adapters,
        direct_weights=direct_way(config),
        sender=controller.trainer,
    )
    model_name = config.model_name
    if config.uses_given_weights:
        claimed = await servers.claimed()
        for each in claimed:
            recorder.event("server_model", **each._asdict())
        model_name = ", ".join(dict.fromkeys(each.model or "unknown" for each in claimed))
    async with deadline(DATA_S, waiter="controller", resource="the dump", holder="its target"):
        dumps = await asyncio.to_thread(
            open_dumps, config, child.run_dir, pool, tasks, recorder.event, model_name=model_name
        )
    searcher = None
    if config.scheduler.tuning.mode == "auto" and config.pipeline == "train":
        searcher = ProcessSearcher(
            child.run_dir / "config.yaml",
            max_cpu_share=config.scheduler.tuning.max_cpu_share,
            run_cpu_s=lambda: recorder.cpu_s,
            costs=lambda: recorder.server_counters(COSTS),
        )
    system = System(
        config=config,
        run_dir=child.run_dir,
        scheduler=Scheduler(
            config, now=asyncio.get_running_loop().time, log_decision=recorder.decision, background=in_thread(beside)
        ),
        tasks=tasks,
        held_out=held_out,
        workers=workers,
        trainer=controller.trainer,
        servers=servers,
        pool=pool,
        recorder=recorder,
        dumps=dumps,
        searcher=searcher,
    )
    if config.scheduler.length.learn_from is not None:
        known = partial(played_before, Path(config.scheduler.length.learn_from), train, max_groups=MAX_LEARNED_GROUPS)
        async with deadline(DATA_S, waiter="controller", resource="lengths to learn", holder="the length predictor"):
            played = await asyncio.to_thread(known)
            await asyncio.to_thread(system.scheduler.lengths.learn_lengths, played)
        recorder.event("lengths_learnt", groups=len(played), run=config.scheduler.length.learn_from)
    if config.env.seeds == "arithmetic":
        recorder.event("alarm", reason=COLLIDES)
    returning: dict[str, asyncio.Task[None] | None] = {}

    def server_is_back(url: str) -> None:
        if earlier := returning.get(url):
            earlier.cancel()
        returning[url] = start(beside, bring_back(url, controller, servers, workers, recorder))

    controller.server_is_back = server_is_back
    servers.set_urls(controller.server_urls)  # a server may have restarted meanwhile
    controller.attach(system)
    try:
        if config.rollout.urls and config.has_trainer:
            await servers.forget_weights()
        async with beside:
            for dump in dumps:
                start(beside, dump.run())
            await PIPELINES[config.pipeline](system)
            workers.close()
            for task in returning.values():  # the run needs no more servers
                if task is not None:
                    task.cancel()
    finally:
        if searcher is not None:
            searcher.close()
        await servers.close()


def tasks_to_play(config: Config, source: MixedTasks, recorder: Recorder) -> TaskSource:
    """Return the first `synthesis.tasks` tasks of `source`, or all of them if that is negative. Record how many there
    are.

    Raises `ConfigError` if all tasks are wanted and the source is endless.
    """
    wanted, size = config.synthesis.tasks, source.size
    if wanted < 0 and size is None:
        tags = ", ".join(tag for tag, each in config.environments.train.items() if each.data.is_endless)
        raise ConfigError(f"synthesis.tasks: the tasks of {tags} are endless: set how many of them to run")
    num_tasks = min(number for number in (wanted if wanted >= 0 else size, size) if number is not None)
    recorder.set_num_tasks(num_tasks)
    return FirstTasks(source, num_tasks)


async def bring_back(
    url: str, controller: Controller, servers: Servers, workers: RemoteWorkers, recorder: Recorder
) -> None:
    """Bring a restarted rollout server back: tell all workers its URL, and load the weights that the other servers
    serve.

    If that fails, try again after `BRING_UP_AGAIN_S`, as long as the server is a member of the run. The wait doubles
    after each failure, because an attempt may take minutes, and no other server gets weights during it. Only the first
    failure is recorded.
    """
    servers.set_urls(controller.server_urls)
    workers.tell(controller.env_workers, messages.ServersChanged(server_urls=controller.server_urls))
    failures, now = Backoff(), asyncio.get_running_loop().time
    while url in controller.server_urls:
        try:
            await servers.bring_up(url)
            recorder.event("server_back", url=url)
            return
        except (RolloutError, Stalled) as error:
            if not failures.num_failed:
                recorder.event("server_lost", url=url, why=str(error))
            failures.fail(now(), unit=BRING_UP_AGAIN_S)
        await asyncio.sleep(failures.retry_at - now())


def start(tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """Start `work` as a background task, unless the run has ended meanwhile."""
    try:
        return tasks.create_task(work)
    except RuntimeError:
        work.close()
        return None


def played_before(run_dir: Path, source: TaskSource, *, max_groups: int) -> list[tuple[Task, list[int]]]:
    """Return the newest complete groups of another run on the same data: (task, response tokens of each member).

    Raises `ConfigError` if `run_dir` has no pool index.
    """
    groups = read_groups(run_dir, setting="scheduler.length.learn_from")
    records = deque((record for record in groups if record.episodes), maxlen=max_groups)
    return [
        (task, [episode.response_tokens for episode in record.episodes])
        for record in records
        if (task := source.task(record.task_index)) is not None and task.task_id == record.task_id
    ]


def in_thread(tasks: asyncio.TaskGroup) -> Background:
    """Return a function that fits length predictors in a thread, so that the event loop stays free."""

    async def fit(compute: Callable[[], object], use: Callable[[object], None]) -> None:
        with warn_if_stalled(FIT_S, waiter="controller", resource="new predictions", holder="the length predictor"):
            use(await asyncio.to_thread(compute))

    def background(compute: Callable[[], object], use: Callable[[object], None]) -> None:
        start(tasks, fit(compute, use))

    return background


async def conclude(system: System) -> None:
    """Save what was learned after a stop request, if the run trains. Groups in flight are run again when the run is
    resumed."""
    scheduler, pipeline = system.scheduler, system.config.pipeline
    if pipeline == "rollout":
        loop.record_progress(system)
    elif pipeline == "train":
        try:
            async with alongside(raise_if_dead(system.run_dir, TRAINER)):
                await save_last(system)
        except* TrainerLost as lost:
            system.recorder.event("checkpoint_missed", step=system.num_steps, reason=str(leaf(lost)))
    ledger = scheduler.evaluations.ledger if pipeline == "eval" else scheduler.ledger
    step = scheduler.groups.num_ended if pipeline == "rollout" else system.num_steps
    system.recorder.event("stopped", step=step, ledger=ledger.counts())


async def save_last(system: System) -> None:
    """Save a last checkpoint if the newest step has none. Raises `TrainerLost`."""
    if system.stepping:
        await asyncio.wait([system.stepping])
    await loop.finish_checkpoint(system)
    is_unsaved = system.scheduler.policy_version != NO_VERSION and not system.is_saved
    if is_unsaved and (await system.trainer.state()).step == system.num_steps:  # else it was just restored
        await loop.begin_checkpoint(system)
        await loop.finish_checkpoint(system)


async def raise_if_dead(run_dir: Path, trainer: str) -> NoReturn:
    """Raise `TrainerLost` as soon as the supervisor reports that the trainer is dead. While a run ends, the supervisor
    restarts no process."""
    while True:
        if (read_state(run_dir) or {}).get("processes", {}).get(trainer, {}).get("state") in DEAD:
            raise TrainerLost(f"{trainer} is dead")
        await asyncio.sleep(LOOK_EVERY_S)
