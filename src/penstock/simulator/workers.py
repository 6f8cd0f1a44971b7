"""Environment workers on the modelled servers: `ports.Workers` without environments, tokens or tasks of asyncio.

A worker plays what the workload has planned for a task: turns of known length, tools that take their time, a reward.
As in the real workers, members that start together share one request and hear from it together; a grant cuts an answer
that is longer; a server that gave way cuts it earlier. A whole group whose answers all fit into their grants takes a
short cut: nothing can happen to it between its start and its end but a server that gives way.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from penstock.config import Config
from penstock.ports import Work
from penstock.scheduler.segments import SegmentPolicy
from penstock.simulator.engine import Request
from penstock.simulator.experience import REF, Experience, OneRequest, Piece, Pieces
from penstock.simulator.fleet import Fleet
from penstock.simulator.workload import Plan, Turn, Workload
from penstock.types import (
    NO_VERSION,
    EpisodeId,
    EpisodeSummary,
    GroupAttempt,
    PayloadRef,
    SegmentGrant,
    TrajectoryStatus,
)

Collect = Callable[[int, PayloadRef | None, Sequence[EpisodeSummary]], None]
Ended = Callable[[int, Sequence[EpisodeSummary], Sequence[PayloadRef | None]], None]


class _Playing:
    """A group in play."""

    __slots__ = ("attempt", "ended", "episodes", "group", "news", "plan", "requests", "size", "started_at")

    def __init__(self, work: Work, plan: Plan, started_at: float) -> None:
        self.group, self.attempt, self.size = work.group, work.attempt, work.group_size
        self.plan, self.started_at = plan, started_at
        self.episodes: dict[int, _Episode] = {}
        self.ended: dict[int, EpisodeSummary] = {}
        self.news: list[EpisodeSummary] = []
        """Ended members that the scheduler has not heard of."""
        self.requests: set[Request] = set()

    def join(self, episodes: Sequence[EpisodeId]) -> list[_Episode]:
        """Members begin to play."""
        joined = [_Episode(episode, self) for episode in episodes]
        self.episodes.update((episode.id.episode, episode) for episode in joined)
        return joined


class _Episode:
    """A member in play."""

    __slots__ = ("id", "left", "num_segments", "num_tokens", "pieces", "playing", "turn", "turn_tokens", "turns")

    def __init__(self, episode: EpisodeId, playing: _Playing) -> None:
        self.id, self.playing = episode, playing
        self.turns: Sequence[Turn] = playing.plan.turns_of(episode.episode)
        self.turn = self.num_tokens = self.turn_tokens = self.num_segments = 0
        self.left = self.turns[0].tokens
        """Tokens to come in this turn."""
        self.pieces: list[Piece] = []

    def versions(self) -> tuple[int, int]:
        """Oldest and newest of its tokens."""
        spans = [span for request, sequence in self.pieces if (span := request.versions(sequence))[0] != NO_VERSION]
        if not spans:
            return NO_VERSION, NO_VERSION
        return min(first for first, _ in spans), max(last for _, last in spans)


class FleetWorkers:
    """All environment workers. `collect` and `ended` are the loop's and the scheduler's; `request_grant` too."""

    def __init__(
        self,
        config: Config,
        *,
        fleet: Fleet,
        workload: Workload,
        experience: Experience,
        collect: Collect,
        ended: Ended,
        request_grant: Callable[..., None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._fleet, self._workload, self._experience = fleet, workload, experience
        self._collect, self._ended, self._request_grant = collect, ended, request_grant
        self._segments = SegmentPolicy.from_config(config, config.env)
        self._penalize, self._latency_s = config.env.penalize_truncation, config.simulator.engine.latency_s
        self._playing: dict[int, _Playing] = {}
        self.started_at: dict[int, float] = {}
        """When each task was first handed out, by its index."""
        self.ended_at, self.whole_at = array("d"), array("d")
        """When each episode had its last token, and each group its last member; by the order of reports."""
        self.cancelled_tokens = self.surplus_tokens = 0

    def start(self, worker: str, work: Work) -> None:
        """Play `work`; a second part of a group joins the first."""
        playing = self._playing.get(work.group)
        if playing is None or playing.attempt != work.attempt:
            now = self._loop.time()
            self.started_at.setdefault(work.task.index, now)
            plan = self._workload.plan(work.task.index, work.attempt)
            playing = self._playing[work.group] = _Playing(work, plan, now)
            is_whole = len(work.members) == work.group_size
            if is_whole and not work.redundancy and _fit(plan, work.max_tokens):
                self._request(playing, plan.lengths, plan.prompt_tokens, self._played_at_once, work)
                return
        episodes = playing.join(work.episodes)
        if work.redundancy:
            for episode, max_tokens in zip(episodes, work.max_tokens, strict=True):
                self._generate(playing, [episode], [max_tokens])
        else:
            self._generate(playing, episodes, work.max_tokens)

    def grant(self, worker: str, grant: SegmentGrant) -> None:
        """Go on with one episode."""
        playing = self._playing.get(grant.episode.group)
        if playing is not None and playing.attempt == grant.episode.attempt:
            self._generate(playing, [playing.episodes[grant.episode.episode]], [grant.max_tokens])

    def cancel(self, attempts: Sequence[GroupAttempt]) -> None:
        """Free their slots."""
        of_old = (self._playing.get(group) for group, _ in attempts)
        last = dict(attempts)
        gone = [playing for playing in of_old if playing is not None and playing.attempt <= last[playing.group]]
        for playing in gone:
            del self._playing[playing.group]
        self.cancelled_tokens += self._tokens_of(gone)

    def _tokens_of(self, gone: Sequence[_Playing]) -> int:
        """What their members had generated; nobody waits for more of it."""
        ended = sum(episode.num_tokens for playing in gone for episode in playing.episodes.values())
        return ended + self._fleet.cancel([request for playing in gone for request in playing.requests])

    def _generate(self, playing: _Playing, episodes: Sequence[_Episode], limits: Sequence[int]) -> None:
        """One request for all of them: their contexts are the same prompt, or there is one of them."""
        lengths = [min(episode.left, limit) for episode, limit in zip(episodes, limits, strict=True)]
        context = playing.plan.prompt_tokens + episodes[0].num_tokens
        self._request(playing, lengths, context, self._generated, episodes)

    def _request(
        self, playing: _Playing, lengths: Sequence[int], context: int, on_done: Callable[[Request], None], key: object
    ) -> None:
        request = Request(lengths, context, on_done, key=key)
        if self._latency_s:
            self._loop.call_later(self._latency_s, self._submit, playing, request)
        else:
            self._submit(playing, request)

    def _submit(self, playing: _Playing, request: Request) -> None:
        if self._playing.get(playing.group) is playing:
            playing.requests.add(request)
            self._fleet.submit(request)

    def _played_at_once(self, request: Request) -> None:
        """A whole group is complete, or was cut."""
        work: Work = request.key  # type: ignore[assignment]
        playing = self._playing[work.group]
        if request.generated is not request.lengths:
            request.key = playing.join(work.episodes)
            self._generated(request)
            return
        request.key = None
        plan, seconds = playing.plan, self._loop.time() - playing.started_at
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
                work.episodes, plan.rewards, plan.lengths, request.all_versions(), strict=True
            )
        ]
        self.ended_at.extend(request.ended)
        self._whole(playing, summaries, OneRequest(request))

    def _generated(self, request: Request) -> None:
        """A request is complete: every episode in it goes its own way."""
        episodes: Sequence[_Episode] = request.key  # type: ignore[assignment]
        playing = episodes[0].playing
        playing.requests.discard(request)
        request.key = None  # no cycles: a long run would be half garbage collection
        if self._playing.get(playing.group) is not playing:
            return  # whole without these
        for sequence, episode in enumerate(episodes):
            tokens = request.generated[sequence]
            episode.pieces.append((request, sequence))
            episode.num_tokens += tokens
            episode.turn_tokens += tokens
            episode.left -= tokens
            if episode.left:
                self._cut(episode, aborted=tokens < request.lengths[sequence])
            else:
                self._turn_ended(episode)
        if len(playing.ended) >= playing.size:
            order = sorted(list(playing.ended)[: playing.size])
            pieces = [playing.episodes.pop(member).pieces for member in order]
            self.surplus_tokens += self._tokens_of([playing])
            self._whole(playing, [playing.ended[member] for member in order], pieces)
        elif playing.news:
            self._loop.call_soon(self._report, playing)

    def _cut(self, episode: _Episode, *, aborted: bool) -> None:
        """The turn is not over."""
        episode.num_segments += not aborted
        decision = self._segments.after(
            finish_reason="abort" if aborted else "length",
            turn_tokens=episode.turn_tokens,
            episode_tokens=episode.num_tokens,
            turn_segments=episode.num_segments,
        )
        if decision.case == "truncated":
            self._end(episode, "truncated")
        else:
            self._request_grant(episode.id, unfinished=True, num_tokens=episode.num_tokens)

    def _turn_ended(self, episode: _Episode) -> None:
        tool_s = episode.turns[episode.turn].tool_s
        episode.turn += 1
        if episode.turn == len(episode.turns):
            self._end(episode, "completed")
            return
        episode.left = episode.turns[episode.turn].tokens
        episode.turn_tokens = episode.num_segments = 0
        self._loop.call_later(tool_s, self._ask_for_turn, episode)

    def _ask_for_turn(self, episode: _Episode) -> None:
        if self._playing.get(episode.id.group) is episode.playing:
            self._request_grant(episode.id, unfinished=False, num_tokens=episode.num_tokens)

    def _end(self, episode: _Episode, status: TrajectoryStatus) -> None:
        playing, member = episode.playing, episode.id.episode
        oldest, newest = episode.versions()
        request, sequence = episode.pieces[-1]
        self.ended_at.append(request.ended[sequence])
        summary = EpisodeSummary(
            episode=episode.id,
            status=status,
            reward=0.0 if status == "truncated" and self._penalize else playing.plan.rewards[member],
            num_turns=max(episode.turn, 1),
            prompt_tokens=playing.plan.prompt_tokens,
            response_tokens=episode.num_tokens,
            version_min=oldest,
            version_max=newest,
            seconds=self._loop.time() - playing.started_at,
        )
        playing.ended[member] = summary
        playing.news.append(summary)

    def _report(self, playing: _Playing) -> None:
        """Tell of members that ended before their group was whole."""
        news, playing.news = playing.news, []
        if news and self._playing.get(playing.group) is playing:
            self._ended(playing.group, news, [None] * len(news))

    def _whole(self, playing: _Playing, episodes: Sequence[EpisodeSummary], pieces: Pieces) -> None:
        del self._playing[playing.group]
        playing.news = []
        self.whole_at.append(self._loop.time())
        self._experience.pieces[playing.group] = pieces
        self._collect(playing.group, REF, episodes)
        self._experience.pieces.pop(playing.group, None)
        playing.episodes.clear()


def _fit(plan: Plan, max_tokens: Sequence[int]) -> bool:
    """Whether no answer will be cut or have another turn."""
    return plan.turns is None and max(plan.lengths) <= min(max_tokens)
