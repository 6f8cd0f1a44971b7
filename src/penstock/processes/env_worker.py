"""The part that all environment workers share: take leased groups, write their tokens to the worker's own pool files,
and send references to the controller."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from penstock.config import Config
from penstock.control import messages
from penstock.control.bus import CONTROLLER, Peer, Unsendable
from penstock.control.messages import AnyMessage
from penstock.deadline import Stalled, deadline, holding
from penstock.envs.manager import WorkPlayer
from penstock.ports.work import Work
from penstock.processes.bus_client import Member, Telemetry, membership
from penstock.processes.group_progress import GroupProgress
from penstock.processes.partial_rollouts import PartialRollouts
from penstock.processes.pool_access import WorkerPool
from penstock.processes.tracing import Trace
from penstock.rollout.servers import Servers
from penstock.routed_experts import Routing
from penstock.samples import Trajectory
from penstock.supervisor.child import Child
from penstock.types import EpisodeId, EpisodeSummary, GroupAttempt, PayloadRef, SegmentGrant

GRANT_S = 3600.0
"""Limit of the wait for an open episode's next grant. In colocated mode a training phase may come in between."""
GOODBYE_S = 2.0
RECALL_S = 600.0
"""Limit of the wait to fetch and read episodes that other workers saved."""
REMEMBERED_CANCELS = 16384
"""Number of cancelled groups to remember: far more than can be on their way to one worker."""


class Worker(Member):
    """Turns bus messages into completed groups. An error in an environment never ends the process; an error in this
    class does."""

    def __init__(
        self,
        config: Config,
        name: str,
        pool: WorkerPool,
        tasks: asyncio.TaskGroup,
        *,
        routing: Routing | None = None,
        trace: Trace | None = None,
    ) -> None:
        """`routing`: what the policy's routers record for the learner; None: nothing. `trace`: called with each episode
        that ends."""
        self._config, self._name, self._trace = config, name, trace
        rollout = config.rollout
        self.servers = Servers(
            [],  # the controller sends the URLs
            engine=rollout.engine,
            api_key=rollout.api_key,
            timeout_s=rollout.request_timeout_s,
            routing=routing,
            seeded=rollout.seeded,
            keeps_weights=config.uses_given_weights,
            takes_turns=config.gives_devices,
            serves_adapters=config.engine_serves_adapters,
        )
        self._writer, self._saved = pool.writer, PartialRollouts(config, pool)
        self._controllers_host = ""
        self._reading = asyncio.Lock()
        """Held while fetched records are read and their files removed, so that only one task does so at a time."""
        self._grants: dict[EpisodeId, asyncio.Future[SegmentGrant]] = {}
        self._groups: dict[int, GroupProgress] = {}
        """Groups by number that this worker has not reported as a whole."""
        self._cancelled: OrderedDict[int, int] = OrderedDict()
        """Highest cancelled attempt of each recently cancelled group."""
        self._open: set[asyncio.Task[None]] = set()
        """Reports that are being sent."""
        self._generated: dict[GroupAttempt, dict[EpisodeId, int]] = {}
        """Members that finished generation since the last report, and the number of tokens of each."""
        self._tasks = tasks
        self._closed = False
        self.peer: Peer | None = None
        self.player: WorkPlayer | None = None
        """Plays the groups; set before this worker joins the run."""
        self.num_played = self.num_surplus_tokens = 0
        self.counts: Callable[[], Mapping[str, float]] = dict
        """Function that returns further counters for telemetry."""

    async def handle(self, _: str, message: AnyMessage) -> AnyMessage | None:
        match message:
            case messages.NewTask(work=work):
                await self._begin(work)
            case messages.Grant(grant=grant):
                waiting = self._grants.get(grant.episode)
                if waiting is not None and not waiting.done():
                    waiting.set_result(grant)
            case messages.ServersChanged(server_urls=urls):
                self.servers.set_urls(urls)
            case messages.Cancel(attempts=attempts):
                for attempt in attempts:
                    self._cancel(attempt)
        return None

    def _cancel(self, cancelled: GroupAttempt) -> None:
        """Stop a cancelled attempt, and remember the cancellation: a `Cancel` broadcast may overtake the request that
        brings the group."""
        number, attempt = cancelled
        if (group := self._groups.get(number)) and group.attempt <= attempt:
            del self._groups[number]
            group.stop()
        self._cancelled[number] = max(attempt, self._cancelled.get(number, attempt))
        self._cancelled.move_to_end(number)
        if len(self._cancelled) > REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        """Save the tokens so far, if that is worthwhile, and wait for the episode's next grant. Implements `Grants` of
        the EnvManager."""
        episode = so_far.episode
        group = self._groups.get(episode.group)
        current = group is not None and group.attempt == episode.attempt
        saved = self._saved.save_cut(group, so_far) if unfinished and group and current else None
        grant: asyncio.Future[SegmentGrant] = asyncio.get_running_loop().create_future()
        self._grants[episode] = grant
        try:
            request = messages.GrantRequest(episode=episode, unfinished=unfinished, num_tokens=num_tokens, saved=saved)
            await self._report_records(request, [saved])
            async with deadline(GRANT_S, waiter=str(episode), resource="its next grant", holder="the scheduler"):
                return await grant
        finally:
            del self._grants[episode]

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        """Report that a member finished generation. Implements `Grants` of the EnvManager.

        Members that finish in one turn of the event loop are reported together.
        """
        attempt = GroupAttempt(episode.group, episode.attempt)
        if attempt not in self._generated:
            self._generated[attempt] = {}
            self._spawn(self._report_generated(attempt), name=f"generated-{episode.group}")
        self._generated[attempt][episode] = num_tokens

    async def _report_generated(self, attempt: GroupAttempt) -> None:
        members = self._generated.pop(attempt)
        await self.ask(messages.EpisodesGenerated(episodes=list(members), num_tokens=list(members.values())))

    async def run(
        self,
        child: Child,
        player: WorkPlayer,
        counts: Callable[[], Mapping[str, float]],
        *,
        stop: asyncio.Event,
        joined: Callable[[], None],
        attached: bool = False,
    ) -> None:
        """Run the groups that the controller hands out, until `stop` is set.

        `counts` returns further counters for telemetry. `joined` is called once the controller has welcomed this
        worker.
        """
        self.player, self.counts = player, counts
        async with membership(child, self._config, role="env", member=self, attached=attached) as peer:
            joined()
            await stop.wait()
            self.close()
            if attached:  # other workers get its groups at once; without an answer the run has ended
                with suppress(Stalled):
                    await peer.request(CONTROLLER, messages.Goodbye(), timeout_s=GOODBYE_S)

    async def _begin(self, work: Work) -> None:
        if not work.saved:
            self._start(work)
            return
        async with holding(self._reading, RECALL_S, waiter=self._name, resource="saved episodes", holder="other work"):
            await self._saved.fetch(work, host=self._controllers_host)
            self._start(work)

    def _start(self, work: Work) -> None:
        """Start members of a group. This worker may have run the group's probe before."""
        number, attempt = work.group, work.attempt
        if self._closed or attempt <= self._cancelled.get(number, -1):
            return
        group = self._groups.get(number)
        if group is None or group.attempt != attempt:
            if group is not None:
                group.stop()
            group = self._groups[number] = GroupProgress(
                work=work,
                saves_cut=self._saved.saves_cut(work.task),
                counts_tokens=self._config.policy.has_tokens,
            )
        saved = self._saved.recall(work)
        for trajectory in saved.ended.values():
            group.keep(trajectory, "")
        group.unreported += saved.failed
        group.num_saved |= {member: len(begun.turns[0].segments) for member, begun in saved.begun.items()}
        has_ended = group.whole or group.failed
        if has_ended or (saved.failed and len(group.unreported) == len(saved.failed)):
            self._spawn(self._report(group), name=f"report-{number}")
        if not has_ended:
            assert self.player is not None
            playing = self.player.play(saved.work, partial(self._ended, group), begun=saved.begun)
            group.tasks.add(self._tasks.create_task(playing))

    def _ended(self, group: GroupProgress, trajectory: Trajectory, text: str) -> None:
        """Keep a member that ended. Members that end in one turn of the event loop are reported together."""
        if self._trace is not None:
            self._trace(group.work.task, trajectory)
        if self._groups.get(group.number) is not group:
            self.num_surplus_tokens += trajectory.num_tokens if group.whole and not group.failed else 0
            return  # whole, cancelled or closed meanwhile
        group.keep(trajectory, text)
        group.unreported.append(trajectory.episode.episode)
        self.num_played += 1
        if len(group.unreported) == 1:
            self._spawn(self._report(group), name=f"report-{group.number}")

    async def _report(self, group: GroupProgress) -> None:
        """Tell the controller of the members that ended, or of the whole group."""
        if self._groups.get(group.number) is not group:
            return  # cancelled or closed meanwhile
        members, group.unreported = sorted(group.unreported), []
        if group.whole or group.failed:
            del self._groups[group.number]  # remove it before the report: the next attempt may follow at once
            if not group.over:
                group.stop()
        if not group.whole:
            saved = self._saved.save_ended(group, members)
            await self._report_records(messages.RewardComputed(episodes=group.summaries(members), saved=saved), saved)
            return
        self.num_surplus_tokens += group.num_tokens(group.surplus)
        ref: PayloadRef | None = None
        if not group.failed and not group.work.keep_text:
            ref = self._writer.append(group.formulated(self._config.env.formulation))
        summaries = group.summaries(group.members)
        await self._report_records(messages.DataGenerated(group=group.number, ref=ref, episodes=summaries), [ref])

    async def _report_records(self, message: AnyMessage, refs: Sequence[PayloadRef | None]) -> None:
        """Report records in this worker's files. The controller has acted when this returns; then the records are
        released. A report that is too large fails its episodes."""
        try:
            await self.ask(message)
        except Unsendable as error:
            await self.ask(_failed(message, str(error)))
        finally:
            self._saved.reported(refs)

    def _spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = self._tasks.create_task(work, name=name)
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        return task

    async def welcomed(self, peer: Peer, welcome: messages.Welcome) -> None:
        """Ask the controller for work."""
        self.peer = peer
        self._controllers_host = welcome.host
        self.servers.set_urls(welcome.server_urls)
        await self.ask(messages.TaskRequest(capacity=self._config.max_open))

    def abandoned(self) -> None:
        self._stop_all()
        self._cancelled.clear()

    def telemetry(self) -> Telemetry:
        counters = {"episodes": self.num_played, "surplus_tokens": self.num_surplus_tokens}
        return Telemetry(progress=self.num_played, counters={**counters, **self.counts()})

    def close(self) -> None:
        """Stop all groups and reports, and accept no more work."""
        self._closed = True
        self._stop_all()
        self._writer.close()

    def _stop_all(self) -> None:
        """Stop all groups and all reports."""
        groups, self._groups = list(self._groups.values()), {}
        self._generated.clear()
        for group in groups:
            group.stop()
        for task in self._open:
            task.cancel()

    async def ask(self, message: AnyMessage) -> None:
        """Send a message to the controller, and wait until it has acted."""
        assert self.peer is not None
        await self.peer.request(CONTROLLER, message, timeout_s=self._config.rollout.request_timeout_s)


def _failed(message: AnyMessage, error: str) -> AnyMessage:
    """Return a report that cannot be sent as one that says only this."""
    if isinstance(message, messages.GrantRequest):
        return messages.GrantRequest(
            episode=message.episode, unfinished=message.unfinished, num_tokens=message.num_tokens, saved=None
        )
    assert isinstance(message, messages.DataGenerated | messages.RewardComputed)
    failed = [EpisodeSummary(episode=each.episode, status="failed", error=error) for each in message.episodes]
    if isinstance(message, messages.DataGenerated):
        return messages.DataGenerated(group=message.group, ref=None, episodes=failed)
    return messages.RewardComputed(episodes=failed, saved=[None] * len(failed))
