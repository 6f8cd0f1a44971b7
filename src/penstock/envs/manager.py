"""Plays leased groups: reset -> generate -> step -> ... -> one trajectory per lease, whatever happens.

Token-in/token-out: the context of a turn is the token ids already seen plus the ids of the new observation; nothing the
policy said is ever re-tokenised. Members that see the same first prompt share one generate request. An exception or a
missed deadline in an environment becomes a `failed` trajectory that says why; only cancellation passes through.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.config import Config
from penstock.deadline import deadline
from penstock.model.chat import ChatTokenizer
from penstock.ports import Environment, PolicyClient, Work
from penstock.types import (
    EpisodeId,
    EpisodeLease,
    Sampling,
    Segment,
    SegmentGrant,
    Task,
    Trajectory,
    TrajectoryStatus,
    Turn,
)

MakeEnvironment = Callable[[Task], Environment]


class Grants(Protocol):
    """Where an episode gets permission to generate again."""

    async def request(self, episode: EpisodeId, *, unfinished: bool) -> SegmentGrant: ...


@dataclass(slots=True, kw_only=True)
class _Episode:
    """An episode in play."""

    lease: EpisodeLease
    grant: SegmentGrant
    task_id: str
    env: Environment
    sampling: Sampling
    started_at: float
    context: list[int] = field(default_factory=list)
    """Every token so far: observations and actions."""
    turns: list[Turn] = field(default_factory=list)
    observation_ids: list[int] = field(default_factory=list)
    reward: float = 0.0
    text: str = ""
    status: TrajectoryStatus = "completed"
    error: str | None = None

    def trajectory(self) -> Trajectory:
        return Trajectory(
            episode=self.lease.episode,
            task_id=self.task_id,
            turns=self.turns,
            reward=self.reward,
            status=self.status,
            error=self.error,
            started_at=self.started_at,
            finished_at=time.time(),
        )


class EpisodeFailure(RuntimeError):
    """An episode cannot go on; becomes the `error` of its trajectory."""


class EnvManager:
    """Plays any number of groups concurrently on one event loop."""

    def __init__(
        self, config: Config, *, make: MakeEnvironment, policy: PolicyClient, grants: Grants, chat: ChatTokenizer
    ) -> None:
        self._env, self._max_context = config.env, config.model.max_context
        self._make, self._policy, self._grants, self._chat = make, policy, grants, chat

    async def play(self, work: Work) -> list[tuple[Trajectory, str]]:
        """One (trajectory, decoded last action) per lease, in the order of the leases."""
        episodes = [
            _Episode(
                lease=lease,
                grant=grant,
                task_id=work.task.task_id,
                env=self._make(work.task),
                sampling=work.sampling,
                started_at=time.time(),
            )
            for lease, grant in zip(work.leases, work.grants, strict=True)
        ]
        await asyncio.gather(*(self._guarded(episode, self._reset(episode)) for episode in episodes))
        await asyncio.gather(*(self._play_alike(members) for members in self._same_prompt(episodes)))
        return [(episode.trajectory(), episode.text) for episode in episodes]

    async def _guarded(self, episode: _Episode, part: Awaitable[None]) -> None:
        """Run a part of an episode; whatever goes wrong ends up on its trajectory."""
        lease = episode.lease
        remaining = lease.deadline_s - (time.time() - episode.started_at)
        try:
            async with deadline(
                remaining, waiter=f"episode {lease.episode}", resource="its end", holder="environment or rollout server"
            ):
                await part
        except Exception as error:  # the boundary between a bad environment and the run
            episode.status = "failed"
            episode.error = f"{type(error).__name__}: {error}"

    async def _reset(self, episode: _Episode) -> None:
        observation, _ = await self._call(episode.env.reset, episode.lease.env_seed)
        self._check_observation(observation)
        episode.observation_ids = self._chat.prompt([{"role": "user", "content": observation}])
        episode.context = list(episode.observation_ids)
        if len(episode.context) + episode.sampling.max_new_tokens > self._max_context:
            raise EpisodeFailure(
                f"prompt_too_long: {len(episode.context)} prompt tokens + {episode.sampling.max_new_tokens} new ones "
                f"exceed model.max_context {self._max_context}"
            )

    @staticmethod
    def _same_prompt(episodes: Sequence[_Episode]) -> list[list[_Episode]]:
        alike: dict[tuple[int, ...], list[_Episode]] = {}
        for episode in episodes:
            if episode.status == "completed":
                alike.setdefault(tuple(episode.context), []).append(episode)
        return list(alike.values())

    async def _play_alike(self, episodes: list[_Episode]) -> None:
        """First turns of members with one prompt go out as one request; then each goes its own way."""
        first = episodes[0]
        try:
            segments = await self._policy.generate(
                first.context,
                [episode.grant for episode in episodes],
                first.sampling,
                [episode.lease.sampling_seed for episode in episodes],
            )
        except Exception as error:  # a lost server fails these episodes, not the worker
            for episode in episodes:
                episode.status, episode.error = "failed", f"{type(error).__name__}: {error}"
            return
        plays = (self._guarded(e, self._play(e, segment)) for e, segment in zip(episodes, segments, strict=True))
        await asyncio.gather(*plays)

    async def _play(self, episode: _Episode, segment: Segment) -> None:
        while True:
            ended = await self._complete_turn(episode, segment)
            action = episode.turns[-1]
            episode.text = self._chat.decode([t for s in action.segments for t in s.token_ids], skip_special=True)
            observation, reward, terminated, truncated, _ = await self._call(episode.env.step, episode.text)
            self._check_step(observation, reward)
            episode.reward += 0.0 if self._env.penalize_truncation and not ended else float(reward)
            if truncated or not ended:
                episode.status = "truncated"
            if terminated or truncated:
                return
            if not self._observe(episode, observation, ended=ended):
                episode.status = "truncated"
                return
            grant = await self._grants.request(episode.lease.episode, unfinished=False)
            segment = await self._generate(episode, grant, episode.sampling.max_new_tokens)

    async def _complete_turn(self, episode: _Episode, segment: Segment) -> bool:
        """Ask for further segments until the answer ends or its budget is used up. True if it ended by itself."""
        segments: list[Segment] = []
        episode.turns.append(Turn(observation_ids=episode.observation_ids, segments=segments))
        budget = episode.sampling.max_new_tokens
        while True:
            if segment.finish_reason == "abort":
                raise EpisodeFailure("the rollout server aborted the request")
            segments.append(segment)
            episode.context += segment.token_ids
            budget -= len(segment.token_ids)
            if segment.finish_reason == "stop" or budget <= 0:
                return segment.finish_reason == "stop"
            grant = await self._grants.request(episode.lease.episode, unfinished=True)
            segment = await self._generate(episode, grant, budget)

    def _observe(self, episode: _Episode, observation: str, *, ended: bool) -> bool:
        """Append the next observation. False if there is no room or no turn left for another action."""
        episode.observation_ids = self._chat.continuation(observation, ended=ended)
        room = self._max_context - len(episode.context) - len(episode.observation_ids)
        if len(episode.turns) >= self._env.max_turns or room < episode.sampling.max_new_tokens:
            return False
        episode.context += episode.observation_ids
        return True

    async def _generate(self, episode: _Episode, grant: SegmentGrant, budget: int) -> Segment:
        grant = SegmentGrant(episode=grant.episode, max_tokens=min(grant.max_tokens, budget))
        seed = episode.lease.sampling_seed + len(episode.context)
        (segment,) = await self._policy.generate(episode.context, [grant], episode.sampling, [seed])
        return segment

    @staticmethod
    async def _call(method: Callable[..., Any], *args: Any) -> Any:
        result = method(*args)
        return await result if inspect.isawaitable(result) else result

    @staticmethod
    def _check_observation(observation: object) -> None:
        if not isinstance(observation, str):
            raise EpisodeFailure(f"the environment's observation is a {type(observation).__name__}, not a string")

    @classmethod
    def _check_step(cls, observation: object, reward: object) -> None:
        cls._check_observation(observation)
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EpisodeFailure(f"the environment's reward is {reward!r}, not a finite number")
