"""Environment workers for the modelled servers: `ports.Workers` without environments, tokens or asyncio tasks.

A worker follows the plan of the workload for a task: turns of known length, tools that take time, a reward. As in the
real workers, members that start together share one request and get its answer together. A grant cuts an answer that is
longer than the grant; a server that is released cuts it earlier. A whole group with answers that all fit into their
grants takes a faster path, because only a released server can interrupt it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from penstock.config import Config
from penstock.ports.work import Work
from penstock.scheduler.members import MemberReports
from penstock.scheduler.segments import SegmentPolicy
from penstock.simulator.experience import REF, Experience, Piece, Pieces
from penstock.simulator.fleet import Fleet
from penstock.simulator.server_model import Request
from penstock.simulator.workload import Plan, Turn, Workload
from penstock.types import NO_VERSION, EpisodeId, EpisodeSummary, GroupAttempt, PayloadRef, SegmentGrant, Summaries

Collect = Callable[[int, PayloadRef | None, Summaries], None]


class _RunningGroup:
    """A running group."""

    def __init__(self, work: Work, plan: Plan, started_at: float) -> None:
        self.group, self.attempt, self.size = work.group, work.attempt, work.group_size
        self.plan, self.started_at = plan, started_at
        self.episodes: dict[int, _Episode] = {}
        self.ended: dict[int, EpisodeSummary] = {}
        self.unreported: list[EpisodeSummary] = []
        """Finished members that are not yet reported to the scheduler."""
        self.requests: set[Request] = set()

    def join(self, episodes: Sequence[EpisodeId]) -> list[_Episode]:
        """Start members, and return their episodes."""
        joined = [_Episode(episode, self) for episode in episodes]
        self.episodes.update((episode.id.episode, episode) for episode in joined)
        return joined


class _Episode:
    """A running member of a group."""

    def __init__(self, episode: EpisodeId, running: _RunningGroup) -> None:
        self.id, self.running = episode, running
        self.turns: Sequence[Turn] = running.plan.turns_of(episode.episode)
        self.turn = self.num_tokens = self.turn_tokens = self.num_segments = 0
        self.env_s = 0.0
        self.left = self.turns[0].tokens
        """Tokens that this turn still needs."""
        self.pieces: list[Piece] = []
        self.spans: list[tuple[int, int]] = []
        """The oldest and newest policy version of each piece with tokens."""


class FleetWorkers:
    """All environment workers. `collect` belongs to the training loop, and `reports` to the scheduler."""

    def __init__(
        self, config: Config, fleet: Fleet, plans: Workload, pool: Experience, collect: Collect, reports: MemberReports
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._fleet, self._workload, self._experience = fleet, plans, pool
        self._collect, self._reports = collect, reports
        self._segments = SegmentPolicy.from_config(config, config.env)
        self._penalize, self._latency_s = config.env.penalize_truncation, config.simulator.engine.latency_s
        self._running: dict[int, _RunningGroup] = {}
        self.started_at: dict[int, float] = {}
        """Time at which each task was first started, by task index."""
        self.ended_at, self.whole_at = array("d"), array("d")
        """Time of the last token of each episode, and of the last member of each group; in the order of reports."""
        self.cancelled_tokens = self.surplus_tokens = 0

    def start(self, worker: str, work: Work) -> None:
        """Run `work`; a second part of a group joins the first."""
        running = self._running.get(work.group)
        if running is None or running.attempt != work.attempt:
            now = self._loop.time()
            self.started_at.setdefault(work.task.index, now)
            plan = self._workload.plan(work.task.index, work.attempt).first(work.group_size + work.redundancy)
            running = self._running[work.group] = _RunningGroup(work, plan, now)
            is_whole = len(work.members) == work.group_size
            fits = plan.turns is None and plan.reward_s is None and max(plan.lengths) <= min(work.max_tokens)
            if is_whole and not work.redundancy and fits:
                self._request(running, plan.lengths, plan.prompt_tokens, self._all_generated, work)
                return
        episodes = running.join(work.episodes)
        if work.redundancy:
            for episode, max_tokens in zip(episodes, work.max_tokens, strict=True):
                self._generate(running, [episode], [max_tokens])
        else:
            self._generate(running, episodes, work.max_tokens)

    def grant(self, worker: str, grant: SegmentGrant) -> None:
        """Continue one episode."""
        running = self._running.get(grant.episode.group)
        if running is not None and running.attempt == grant.episode.attempt:
            self._generate(running, [running.episodes[grant.episode.episode]], [grant.max_tokens])

    def cancel(self, attempts: Sequence[GroupAttempt]) -> None:
        """Cancel the running groups of `attempts` and free their slots."""
        of_old = (self._running.get(group) for group, _ in attempts)
        last = dict(attempts)
        gone = [running for running in of_old if running is not None and running.attempt <= last[running.group]]
        for running in gone:
            del self._running[running.group]
        self.cancelled_tokens += self._tokens_of(gone)

    def _tokens_of(self, gone: Sequence[_RunningGroup]) -> int:
        """Cancel the requests of `gone`, and return the number of tokens that its members had generated."""
        ended = sum(episode.num_tokens for running in gone for episode in running.episodes.values())
        return ended + self._fleet.cancel([request for running in gone for request in running.requests])

    def _generate(self, running: _RunningGroup, episodes: Sequence[_Episode], limits: Sequence[int]) -> None:
        """Send one request for all `episodes`. Their contexts are the same prompt, or there is only one episode."""
        lengths = [min(episode.left, limit) for episode, limit in zip(episodes, limits, strict=True)]
        context = running.plan.prompt_tokens + episodes[0].num_tokens
        self._request(running, lengths, context, self._generated, episodes)

    def _request(
        self, running: _RunningGroup, lengths: Sequence[int], context: int, done: Callable[[Request], None], key: object
    ) -> None:
        request = Request(lengths, context, done, key=key)
        if self._latency_s:
            self._loop.call_later(self._latency_s, self._submit, running, request)
        else:
            self._submit(running, request)

    def _submit(self, running: _RunningGroup, request: Request) -> None:
        if self._running.get(running.group) is running:
            running.requests.add(request)
            self._fleet.submit(request)

    def _all_generated(self, request: Request) -> None:
        """Handle the answer of a whole group, complete or cut."""
        work: Work = request.key  # type: ignore[assignment]
        running = self._running[work.group]
        if request.generated is not request.lengths:
            request.key = running.join(work.episodes)
            self._generated(request)
            return
        request.key = None
        plan, seconds = running.plan, self._loop.time() - running.started_at
        prompt_tokens = plan.prompt_tokens
        summaries = [
            EpisodeSummary(
                episode=episode,
                status="completed",
                reward=reward,
                num_turns=1,
                prompt_tokens=prompt_tokens,
                response_tokens=length,
                version_min=oldest,
                version_max=newest,
                seconds=seconds,
            )
            for episode, reward, length, (oldest, newest) in zip(
                work.episodes, plan.rewards, plan.lengths, request.versions(), strict=True
            )
        ]
        self.ended_at.extend(request.ended)
        self._whole(running, summaries, request)

    def _generated(self, request: Request) -> None:
        """Handle a complete request: each of its episodes continues separately."""
        episodes: Sequence[_Episode] = request.key  # type: ignore[assignment]
        running = episodes[0].running
        running.requests.discard(request)
        request.key = None  # avoid cycles: garbage collection would take half of a long run
        if self._running.get(running.group) is not running:
            return  # the group is complete without these members
        for sequence, (episode, span) in enumerate(zip(episodes, request.versions(), strict=True)):
            tokens = request.generated[sequence]
            if tokens:
                episode.spans.append(span)
            episode.pieces.append((request, sequence))
            episode.num_tokens += tokens
            episode.turn_tokens += tokens
            episode.left -= tokens
            if episode.left:
                self._cut(episode, aborted=tokens < request.lengths[sequence])
            else:
                self._turn_ended(episode)
        self._complete_if_whole(running)

    def _complete_if_whole(self, running: _RunningGroup) -> None:
        """Collect a group with enough ended members, and report the ended members of another group."""
        if len(running.ended) >= running.size:
            order = sorted(list(running.ended)[: running.size])
            pieces = [running.episodes.pop(member).pieces for member in order]
            self.surplus_tokens += self._tokens_of([running])
            self._whole(running, [running.ended[member] for member in order], pieces)
        elif running.unreported:
            self._loop.call_soon(self._report, running)

    def _cut(self, episode: _Episode, *, aborted: bool) -> None:
        """Handle a turn that was cut: truncate the episode or ask for another grant."""
        episode.num_segments += not aborted
        state = self._segments.after(
            reason="abort" if aborted else "length",
            turn_tokens=episode.turn_tokens,
            episode_tokens=episode.num_tokens,
            turn_segments=episode.num_segments,
        )
        if state == "truncated":
            self._end(episode, truncated=True)
        else:
            self._ask_for_grant(episode, unfinished=True)

    def _turn_ended(self, episode: _Episode) -> None:
        tool_s = episode.turns[episode.turn].tool_s
        episode.turn += 1
        if episode.turn == len(episode.turns):
            self._await_reward(episode)
            return
        episode.env_s += tool_s
        episode.left = episode.turns[episode.turn].tokens
        episode.turn_tokens = episode.num_segments = 0
        self._loop.call_later(tool_s, self._ask_for_turn, episode)

    def _await_reward(self, episode: _Episode) -> None:
        """End the episode once its reward is computed. Meanwhile other episodes may generate."""
        reward_s = episode.running.plan.reward_s
        if reward_s is None:
            self._end(episode, truncated=False)
            return
        self._reports.finish_generation(episode.id.group_attempt, [episode.id.episode], episode.num_tokens)
        self._loop.call_later(reward_s[episode.id.episode], self._rewarded, episode)

    def _rewarded(self, episode: _Episode) -> None:
        if self._running.get(episode.id.group) is episode.running:
            self._end(episode, truncated=False)
            self._complete_if_whole(episode.running)

    def _ask_for_turn(self, episode: _Episode) -> None:
        if self._running.get(episode.id.group) is episode.running:
            self._ask_for_grant(episode, unfinished=False)

    def _ask_for_grant(self, episode: _Episode, *, unfinished: bool) -> None:
        attempt, member = episode.id.group_attempt, episode.id.episode
        self._reports.request_grant(attempt, member, unfinished=unfinished, num_tokens=episode.num_tokens)

    def _end(self, episode: _Episode, *, truncated: bool) -> None:
        running, member = episode.running, episode.id.episode
        request, sequence = episode.pieces[-1]
        self.ended_at.append(request.ended[sequence])
        summary = EpisodeSummary(
            episode=episode.id,
            status="truncated" if truncated else "completed",
            reward=0.0 if truncated and self._penalize else running.plan.rewards[member],
            num_turns=max(episode.turn, 1),
            prompt_tokens=running.plan.prompt_tokens,
            response_tokens=episode.num_tokens,
            version_min=min((oldest for oldest, _ in episode.spans), default=NO_VERSION),
            version_max=max((newest for _, newest in episode.spans), default=NO_VERSION),
            seconds=self._loop.time() - running.started_at,
            env_s=episode.env_s,
            reward_s=0.0 if running.plan.reward_s is None else running.plan.reward_s[member],
        )
        running.ended[member] = summary
        running.unreported.append(summary)

    def _report(self, running: _RunningGroup) -> None:
        """Report members that ended before their group was complete."""
        summaries, running.unreported = running.unreported, []
        if summaries and self._running.get(running.group) is running:
            self._reports.end_members(summaries[0].episode.group_attempt, summaries, [None] * len(summaries))

    def _whole(self, running: _RunningGroup, episodes: Summaries, pieces: Pieces) -> None:
        del self._running[running.group]
        running.unreported = []
        self.whole_at.append(self._loop.time())
        self._experience.pieces[running.group] = pieces
        self._collect(running.group, REF, episodes)
        self._experience.pieces.pop(running.group, None)
        running.episodes.clear()
