"""Plays leased groups: reset -> generate -> step -> ... -> one trajectory per lease, whatever happens.

Token-in/token-out: the context of a turn is the token ids already seen plus the ids of the new observation; nothing the
policy said is ever re-tokenised. Members that see the same first prompt share one generate request. An exception or a
missed deadline in an environment becomes a `failed` trajectory that says why; only cancellation passes through.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.config import Config, ConfigError
from penstock.deadline import Stalled, deadline
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
    sampling: Sampling
    started_at: float
    env: Any = None
    """The environment, once it is made."""
    context: list[int] = field(default_factory=list)
    """Every token so far: observations and actions."""
    turns: list[Turn] = field(default_factory=list)
    observation: str = ""
    observation_ids: list[int] = field(default_factory=list)
    reward: float = 0.0
    text: str = ""
    status: TrajectoryStatus = "completed"
    error: str | None = None
    ended: bool = False
    """Nothing more will happen: played to its end, or failed."""

    def fail(self, error: Exception) -> None:
        self.status, self.error, self.ended = "failed", f"{type(error).__name__}: {error}", True

    @contextmanager
    def contained(self) -> Iterator[None]:
        """The boundary between a bad environment and the run: an exception becomes the trajectory's `error`."""
        try:
            yield
        except ConfigError:
            raise  # no episode could do better: the run is told
        except Exception as error:
            self.fail(error)

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


@contextmanager
def _contained_together(episodes: Sequence[_Episode]) -> Iterator[None]:
    """A lost server or a refused prompt fails these episodes, not the worker."""
    try:
        yield
    except Exception as error:
        for episode in episodes:
            episode.fail(error)


def _by_observation(episodes: Sequence[_Episode]) -> dict[str, list[_Episode]]:
    alike: dict[str, list[_Episode]] = {}
    for episode in episodes:
        if not episode.ended:
            alike.setdefault(episode.observation, []).append(episode)
    return alike


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
                sampling=work.sampling,
                started_at=time.time(),
            )
            for lease, grant in zip(work.leases, work.grants, strict=True)
        ]
        try:
            async with deadline(
                work.leases[0].deadline_s,
                waiter=f"group {work.leases[0].episode.group} of {work.task.task_id}",
                resource="the end of its episodes",
                holder="their environments or a rollout server",
            ):
                await self._reset_all(work.task, episodes)
                async with asyncio.TaskGroup() as tasks:
                    for observation, members in _by_observation(episodes).items():
                        tasks.create_task(self._play_alike(observation, members))
        except Stalled as stalled:
            for episode in episodes:
                if not episode.ended:
                    episode.fail(stalled)
        return [(episode.trajectory(), episode.text) for episode in episodes]

    async def _reset_all(self, task: Task, episodes: Sequence[_Episode]) -> None:
        """Synchronous environments one after the other, asynchronous ones together."""
        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                with episode.contained():
                    episode.env = self._make(task)
                    result = self._call(episode.env, "reset", episode.lease.env_seed)
                    if inspect.isawaitable(result):
                        tasks.create_task(self._observe_first(episode, result))
                    else:
                        episode.observation = self._check_observation(result[0])

    async def _observe_first(self, episode: _Episode, result: Awaitable[Any]) -> None:
        with episode.contained():
            episode.observation = self._check_observation((await result)[0])

    async def _play_alike(self, observation: str, episodes: list[_Episode]) -> None:
        """Members that see the same share their first request; then each goes its own way."""
        sampling = episodes[0].sampling
        with _contained_together(episodes):
            prompt_ids = self._chat.prompt([{"role": "user", "content": observation}])
            if len(prompt_ids) + sampling.max_new_tokens > self._max_context:
                raise EpisodeFailure(
                    f"prompt_too_long: {len(prompt_ids)} prompt tokens + {sampling.max_new_tokens} new ones "
                    f"exceed model.max_context {self._max_context}"
                )
            segments = await self._policy.generate(
                prompt_ids,
                [episode.grant for episode in episodes],
                sampling,
                [episode.lease.sampling_seed for episode in episodes],
            )
            async with asyncio.TaskGroup() as tasks:
                for episode, segment in zip(episodes, segments, strict=True):
                    episode.observation_ids = prompt_ids
                    episode.context = list(prompt_ids)
                    tasks.create_task(self._play_contained(episode, segment))

    async def _play_contained(self, episode: _Episode, segment: Segment) -> None:
        with episode.contained():
            await self._play(episode, segment)
            episode.ended = True

    async def _play(self, episode: _Episode, segment: Segment) -> None:
        while True:
            ended = await self._complete_turn(episode, segment)
            action = episode.turns[-1]
            episode.text = self._chat.decode([t for s in action.segments for t in s.token_ids], skip_special=True)
            observation, reward, terminated, truncated, _ = await self._awaited(
                self._call(episode.env, "step", episode.text)
            )
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
        seeds = [episode.lease.sampling_seed]  # the engine mixes in the position: a cut answer goes on as if uncut
        (segment,) = await self._policy.generate(episode.context, [grant], episode.sampling, seeds)
        return segment

    @staticmethod
    def _call(env: Environment, method: str, *args: Any) -> Any:
        """What the method returns, or an awaitable of it. Environments that declare `blocking = True` get a thread."""
        bound = getattr(env, method)
        return asyncio.to_thread(bound, *args) if getattr(env, "blocking", False) else bound(*args)

    @staticmethod
    async def _awaited(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    @staticmethod
    def _check_observation(observation: object) -> str:
        if not isinstance(observation, str):
            raise EpisodeFailure(f"the environment's observation is a {type(observation).__name__}, not a string")
        return observation

    @classmethod
    def _check_step(cls, observation: object, reward: object) -> None:
        cls._check_observation(observation)
        if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            raise EpisodeFailure(f"the environment's reward is {reward!r}, not a finite number")
