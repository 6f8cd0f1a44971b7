"""An environment worker: plays leased groups, appends their tokens to its own pool files, sends references."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from penstock.config import Config, load_config
from penstock.config.atropos import ATROPOS
from penstock.control.bus import CONTROLLER, Peer
from penstock.control.messages import (
    AnyMessage,
    Cancel,
    DataGenerated,
    EpisodesEnded,
    EpisodesGenerated,
    Goodbye,
    Grant,
    GrantRequest,
    NewTask,
    ServersChanged,
    TaskRequest,
    Welcome,
)
from penstock.deadline import Stalled, deadline, holding
from penstock.envs.agents import Gateway
from penstock.envs.isolated import making
from penstock.envs.manager import EnvManager, Job, run_rollout_loop
from penstock.envs.registry import is_agent, resolve
from penstock.envs.rewards.scorer import scoring
from penstock.model.chat import ChatTokenizer
from penstock.ports import Environment, Work
from penstock.processes.layout import model_dir
from penstock.processes.member import Telemetry, membership
from penstock.processes.playing import PlayedGroup
from penstock.processes.pool import WorkerPool, pool_of_worker
from penstock.processes.saved import SavedEpisodes
from penstock.rollout.servers import Servers
from penstock.supervisor.child import Child
from penstock.types import EpisodeId, GroupAttempt, PayloadRef, SegmentGrant, Trajectory

GRANT_TIMEOUT_S = 3600.0
"""For the next grant of an open episode: where phases alternate, a phase of training may lie in between."""
GOODBYE_S = 2.0
RECALL_S = 600.0
"""For others' saved episodes to be fetched and read."""
LOOPBACK = "127.0.0.1"
REMEMBERED_CANCELS = 16384
"""Far more groups than can be on their way to one worker."""


class Worker:
    """Turns bus messages into played groups. A bad environment never ends the process; a defect in here does."""

    def __init__(self, config: Config, name: str, pool: WorkerPool, tasks: asyncio.TaskGroup, servers: Servers) -> None:
        self._config, self._name, self._servers = config, name, servers
        self._saved = SavedEpisodes(config, pool)
        self._controllers_host = ""
        self._recalling = asyncio.Lock()
        """Files of fetched records are read and removed by one at a time."""
        self._grants: dict[EpisodeId, asyncio.Future[SegmentGrant]] = {}
        self._groups: dict[int, PlayedGroup] = {}
        """Groups that have not been reported as a whole."""
        self._cancelled: OrderedDict[int, int] = OrderedDict()
        """Highest cancelled attempt of the groups cancelled last."""
        self._open: set[asyncio.Task[None]] = set()
        """Reports on their way."""
        self._jobs: asyncio.Queue[Job | None] = asyncio.Queue()
        self._generated: dict[GroupAttempt, dict[EpisodeId, int]] = {}
        """Members that said their last word since the last report, and the tokens of each."""
        self._tasks = tasks
        self._closed = False
        self.peer: Peer | None = None
        self.num_played = self.num_surplus_tokens = 0
        self.counts: Callable[[], Mapping[str, float]] = dict
        """What else there is to count."""

    async def handle(self, _: str, message: AnyMessage) -> AnyMessage | None:
        match message:
            case NewTask(work=work):
                await self._begin(work)
            case Grant(grant=grant):
                waiting = self._grants.get(grant.episode)
                if waiting is not None and not waiting.done():
                    waiting.set_result(grant)
            case ServersChanged(server_urls=urls):
                self._servers.set_urls(urls)
            case Cancel(attempts=attempts):
                for attempt in attempts:
                    self._cancel(attempt)
        return None

    def _cancel(self, cancelled: GroupAttempt) -> None:
        """Play it no more. What has not arrived yet is remembered: broadcasts and requests overtake each other."""
        number, attempt = cancelled
        if (group := self._groups.get(number)) and group.attempt <= attempt:
            del self._groups[number]
            group.stop()
        self._cancelled[number] = max(attempt, self._cancelled.get(number, attempt))
        self._cancelled.move_to_end(number)
        if len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        """`Grants` of the EnvManager."""
        episode = so_far.episode
        group = self._groups.get(episode.group)
        current = group is not None and group.attempt == episode.attempt
        saved = self._saved.save_cut(group, so_far) if unfinished and group and current else None
        grant: asyncio.Future[SegmentGrant] = asyncio.get_running_loop().create_future()
        self._grants[episode] = grant
        try:
            await self._report_records(
                GrantRequest(
                    worker=self._name, episode=episode, unfinished=unfinished, num_tokens=num_tokens, saved=saved
                ),
                [saved],
            )
            async with deadline(
                GRANT_TIMEOUT_S, waiter=str(episode), resource="its next grant", holder="the scheduler"
            ):
                return await grant
        finally:
            del self._grants[episode]

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        """`Grants` of the EnvManager. Members that come here in one turn of the event loop are reported together."""
        attempt = GroupAttempt(episode.group, episode.attempt)
        if attempt not in self._generated:
            self._generated[attempt] = {}
            self._spawn(self._report_generated(attempt), name=f"generated-{episode.group}")
        self._generated[attempt][episode] = num_tokens

    async def _report_generated(self, attempt: GroupAttempt) -> None:
        members = self._generated.pop(attempt)
        await self.ask(EpisodesGenerated(worker=self._name, episodes=list(members), num_tokens=list(members.values())))

    async def jobs(self) -> AsyncIterator[Job]:
        """What the scheduler hands out, until this worker closes."""
        while (job := await self._jobs.get()) is not None:
            yield job

    async def _begin(self, work: Work) -> None:
        if not work.saved:
            self._start(work)
            return
        async with holding(
            self._recalling, RECALL_S, waiter=self._name, resource="saved episodes", holder="other work"
        ):
            await self._saved.fetch(work, host=self._controllers_host)
            self._start(work)

    def _start(self, work: Work) -> None:
        """Play members of a group, perhaps of one whose probe was played here before."""
        number, attempt = work.group, work.attempt
        if self._closed or attempt <= self._cancelled.get(number, -1):
            return
        group = self._groups.get(number)
        if group is None or group.attempt != attempt:
            if group is not None:
                group.stop()
            group = PlayedGroup(
                number=number,
                attempt=attempt,
                size=work.group_size,
                redundancy=work.redundancy,
                keep_text=work.keep_text,
                saves_cut=self._saved.saves_cut(work.task),
            )
            self._groups[number] = group
        saved = self._saved.recall(work)
        for trajectory in saved.ended.values():
            group.keep(trajectory, "")
        group.unreported += saved.failed
        group.num_saved |= {member: len(begun.turns[0].segments) for member, begun in saved.begun.items()}
        if group.whole or group.failed:
            self._spawn(self._report(group), name=f"report-{number}")
        else:
            self._jobs.put_nowait(
                Job(
                    work=saved.work,
                    begun=saved.begun,
                    started=partial(self._started, group),
                    ended=partial(self._ended, group),
                )
            )

    def _started(self, group: PlayedGroup, task: asyncio.Task[None]) -> None:
        """`task` plays members of the group, unless nobody waits for them any more."""
        group.tasks.add(task)
        if self._groups.get(group.number) is not group:
            group.stop()

    def _ended(self, group: PlayedGroup, trajectory: Trajectory, text: str) -> None:
        """A member ended. All that do so in one turn of the event loop are reported together."""
        if self._groups.get(group.number) is not group:
            self.num_surplus_tokens += trajectory.num_tokens if group.whole and not group.failed else 0
            return  # whole, cancelled or closed meanwhile
        group.keep(trajectory, text)
        group.unreported.append(trajectory.episode.episode)
        self.num_played += 1
        if len(group.unreported) == 1:
            self._spawn(self._report(group), name=f"report-{group.number}")

    async def _report(self, group: PlayedGroup) -> None:
        """Tell the controller of the members that ended, or of the whole group."""
        if self._groups.get(group.number) is not group:
            return  # cancelled or closed meanwhile
        members, group.unreported = sorted(group.unreported), []
        if group.whole or group.failed:
            del self._groups[group.number]  # before the controller hears of it: a next attempt may follow at once
            if not group.over:
                group.stop()
        if group.whole:
            await self._report_whole(group)
            return
        saved = self._saved.save_ended(group, members)
        await self._report_records(
            EpisodesEnded(worker=self._name, group=group.number, episodes=group.summaries(members), saved=saved), saved
        )

    async def _report_whole(self, group: PlayedGroup) -> None:
        members = group.members
        self.num_surplus_tokens += group.num_tokens(group.surplus)
        ref: PayloadRef | None = None
        if not group.failed and not group.keep_text:
            ref = self._saved.append(group.formulated(self._config.env.formulation))
        await self._report_records(
            DataGenerated(worker=self._name, group=group.number, ref=ref, episodes=group.summaries(members)), [ref]
        )

    async def _report_records(self, message: AnyMessage, refs: Sequence[PayloadRef | None]) -> None:
        """Tell the controller of what lies in this worker's files; it has acted when it answers."""
        try:
            await self.ask(message)
        finally:
            self._saved.reported(refs)

    def _spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = self._tasks.create_task(work, name=name)
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def welcomed(self, peer: Peer, welcome: Welcome) -> None:
        """Ask the controller for work."""
        self.peer = peer
        self._controllers_host = welcome.host
        self._servers.set_urls(welcome.server_urls)
        await self.ask(TaskRequest(worker=self._name, capacity=self._config.max_open))

    def abandoned(self) -> None:
        """The controller died, and what it had asked for is forgotten: another one will ask again."""
        self._give_up()
        self._cancelled.clear()

    def telemetry(self) -> Telemetry:
        counters = {"episodes": self.num_played, "surplus_tokens": self.num_surplus_tokens}
        return Telemetry(progress=self.num_played, counters={**counters, **self.counts()})

    def close(self) -> None:
        """Give up what is being played or reported; what is still asked for is not played."""
        self._closed = True
        self._give_up()
        self._jobs.put_nowait(None)
        self._saved.close()

    def _give_up(self) -> None:
        """Nobody waits for what is being played or reported."""
        groups, self._groups = list(self._groups.values()), {}
        self._generated.clear()
        for group in groups:
            group.stop()
        for task in self._open:
            task.cancel()

    async def ask(self, message: AnyMessage) -> None:
        """Tell the controller, and wait until it has acted."""
        assert self.peer is not None
        await self.peer.request(CONTROLLER, message, timeout_s=self._config.rollout.request_timeout_s)


async def serve(child: Child) -> None:
    config = load_config(child.run_dir / "config.yaml")
    if config.env.name == ATROPOS:
        from penstock.processes import atropos

        await atropos.trade(child, config)
        return
    kinds = {name: resolve(name) for name in config.environments.names}
    await play(child, config, kinds, stop=child.stop_event(), joined=child.report_ready)


async def play(
    child: Child,
    config: Config,
    kinds: Mapping[str, type[Environment]],
    *,
    stop: asyncio.Event,
    joined: Callable[[], None],
    attached: bool = False,
) -> None:
    """Play what the controller gives out, in environments of `kinds` (by name), until told to stop. `joined` is called
    once it knows of this worker."""
    chat = ChatTokenizer.load(model_dir(config, child.run_dir))
    async with (
        making(config, kinds) as make,
        scoring(config) as scorers,
        gateway_for_agents(config, kinds.values(), chat) as gateway,
        asyncio.TaskGroup() as tasks,
    ):
        servers = servers_of(config)
        worker = Worker(config, child.name, pool_of_worker(child), tasks, servers)
        manager = EnvManager(
            config, make=make, policy=servers, grants=worker, chat=chat, gateway=gateway, scorers=scorers
        )
        worker.counts = manager.counts
        tasks.create_task(run_rollout_loop(manager, worker.jobs()))
        await work(child, config, worker, stop=stop, joined=joined, attached=attached)
        await servers.close()


def servers_of(config: Config) -> Servers:
    """The controller says where they are."""
    return Servers(
        [],
        engine=config.rollout.engine,
        api_key=config.rollout.api_key,
        timeout_s=config.rollout.request_timeout_s,
    )


async def work(
    child: Child,
    config: Config,
    worker: Worker,
    *,
    stop: asyncio.Event,
    joined: Callable[[], None],
    attached: bool = False,
) -> None:
    """Be a member of the run until told to stop."""
    async with membership(
        child,
        config,
        role="env",
        handler=worker.handle,
        telemetry=worker.telemetry,
        abandoned=worker.abandoned,
        welcomed=worker.welcomed,
        attached=attached,
    ) as peer:
        joined()
        await stop.wait()
        worker.close()
        if attached:
            await say_goodbye(peer)


async def say_goodbye(peer: Peer) -> None:
    """So that what was being played here goes to others at once. Where nobody answers, the run has ended."""
    with suppress(Stalled):
        await peer.request(CONTROLLER, Goodbye(name=peer.name), timeout_s=GOODBYE_S)


@asynccontextmanager
async def gateway_for_agents(
    config: Config, kinds: Iterable[type[Environment]], chat: ChatTokenizer
) -> AsyncIterator[Gateway | None]:
    """On loopback, for the length of the body, if an environment is an agent."""
    if not any(map(is_agent, kinds)):
        yield None
        return
    from penstock.compat.gateway import AgentGateway
    from penstock.processes.listening import bind, listening, url_of

    gateway = AgentGateway(chat, model_name=config.model.path)
    listener = bind(LOOPBACK, 0)
    gateway.url = url_of(LOOPBACK, listener)
    async with listening(gateway, listener):
        yield gateway
