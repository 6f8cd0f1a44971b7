"""Plays leased episodes: reset -> generate -> step -> ... -> one trajectory per lease, whatever happens.

Token-in/token-out: the context of a turn is the token ids already seen plus the ids of the new observation; nothing the
policy said is ever re-tokenised. Members that see the same first prompt share one generate request. An answer that is
cut, by its grant or by a server that gave way, waits for its next grant with its environment parked. An exception or a
missed deadline in an environment becomes a `failed` trajectory that says why; only cancellation passes through.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from penstock.config import Config
from penstock.envs.agents import Conversation, Gateway, Patience
from penstock.envs.calls import EpisodeFailure, call, call_async, check_observation, check_reward, check_step, close
from penstock.envs.episode import Episode, contained_together, spending
from penstock.model.chat import ChatTokenizer
from penstock.ports import Environment, PolicyClient, Work
from penstock.scheduler.segments import SegmentPolicy
from penstock.types import Segment, SegmentGrant, Task, Trajectory

MakeEnvironment = Callable[[Task], Environment]

Ended = Callable[[Trajectory, str], None]
"""Called with an episode's trajectory and its decoded last action."""

ANSWER = {"resource": "an answer", "holder": "a rollout server"}
RESET = {"resource": "its first observation", "holder": "its environment"}
STEP = {"resource": "its next observation", "holder": "its environment"}


class Grants(Protocol):
    """Where an episode gets permission to generate again."""

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        """`unfinished`: its last answer was cut. `num_tokens`: generated so far."""
        ...


class EnvManager:
    """Plays any number of groups concurrently on one event loop."""

    def __init__(
        self,
        config: Config,
        *,
        make: MakeEnvironment,
        policy: PolicyClient,
        grants: Grants,
        chat: ChatTokenizer,
        gateway: Gateway | None = None,
    ) -> None:
        """`gateway`: for environments that are agents."""
        self._env, self._max_context = config.env, config.model.max_context
        self._bounds = SegmentPolicy.from_config(config)
        self._make, self._policy, self._grants, self._chat = make, policy, grants, chat
        self._gateway = gateway

    async def play(self, work: Work, ended: Ended, *, begun: Mapping[int, Trajectory] | None = None) -> None:
        """Play every lease; `ended` hears of each episode as soon as it ends. Members in `begun` go on from there."""
        episodes = self._episodes(work, ended)
        try:
            await self._play_all(work, episodes, begun or {})
        finally:
            for episode in episodes:
                await close(episode.env)

    async def _play_all(self, work: Work, episodes: Sequence[Episode], begun: Mapping[int, Trajectory]) -> None:
        await self._reset_all(work.task, episodes)
        fresh: dict[str, list[Episode]] = {}
        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                saved = begun.get(episode.lease.episode.episode)
                if _is_agent(episode.env):
                    tasks.create_task(self._play_agent(episode))
                elif saved is None and not episode.ended:
                    fresh.setdefault(episode.observation, []).append(episode)
                elif saved is not None and not episode.ended:
                    tasks.create_task(self._play_on(episode, saved))
            for observation, members in fresh.items():
                tasks.create_task(self._play_alike(observation, members))

    def _episodes(self, work: Work, ended: Ended) -> list[Episode]:
        bounds = replace(self._bounds, max_new_tokens=work.sampling.max_new_tokens)
        return [
            Episode(
                lease=lease,
                grant=grant,
                task_id=work.task.task_id,
                sampling=work.sampling,
                bounds=bounds,
                on_end=lambda episode: ended(episode.trajectory(), episode.text),
            )
            for lease, grant in zip(work.leases, work.grants, strict=True)
        ]

    async def _reset_all(self, task: Task, episodes: Sequence[Episode]) -> None:
        """Synchronous environments one after the other, asynchronous ones together."""
        async with asyncio.TaskGroup() as tasks:
            for episode in episodes:
                with episode.contained():
                    episode.env = self._make(task)
                    if _is_agent(episode.env):
                        continue
                    result = call(episode.env, "reset", episode.lease.env_seed)
                    if inspect.isawaitable(result):
                        tasks.create_task(self._observe_first(episode, result))
                    else:
                        episode.observation = check_observation(result[0])

    async def _observe_first(self, episode: Episode, result: Awaitable[Any]) -> None:
        with episode.contained():
            async with spending([episode], **RESET):
                episode.observation = check_observation((await result)[0])

    async def _play_agent(self, episode: Episode) -> None:
        """The agent plays; what it asks the policy meanwhile are the episode's turns."""
        with episode.contained():
            if self._gateway is None:
                raise EpisodeFailure("this worker has no gateway for agents")
            lease = episode.lease
            patience = Patience(lease.deadline_s, waiter=f"{lease.episode} of {episode.task_id}")
            conversation = Conversation(
                episode,
                self._chat,
                partial(self._generate_for_agent, patience),
                max_turns=self._env.max_turns,
                max_context=self._max_context,
            )
            endpoint = await self._gateway.open(conversation)
            try:
                reward = await patience.bound(call_async(episode.env, "play", endpoint, lease.env_seed))
            except Exception:
                if not conversation.over:
                    raise
                reward = 0.0  # an agent may well give up when it is told that nothing more can be said
            finally:
                await self._gateway.close(endpoint)
            check_reward(reward)
            if not episode.turns:
                raise EpisodeFailure(conversation.over or "the agent never asked the policy anything")
            if conversation.over or conversation.cut:
                episode.status = "truncated"
            episode.reward = 0.0 if self._env.penalize_truncation and conversation.cut else float(reward)
        episode.end()

    async def _generate_for_agent(self, patience: Patience, episode: Episode, unfinished: bool) -> Segment:
        """The first answer has its grant already."""
        grant = episode.grant
        if unfinished or len(episode.turns) > 1:
            grant = await patience.excuse(self._next_grant(episode, unfinished=unfinished))
        return await self._policy_segment(episode, grant)

    async def _play_alike(self, observation: str, episodes: list[Episode]) -> None:
        """Members that see the same share their first request; then each goes its own way."""
        segments: list[Segment] = []
        with contained_together(episodes):
            prompt_ids = self._prompt(observation, episodes[0])
            for episode in episodes:
                episode.open_turn(prompt_ids)
            async with spending(episodes, **ANSWER):
                segments = await self._policy.generate(
                    prompt_ids,
                    [episode.within_budget(episode.grant) for episode in episodes],
                    episodes[0].sampling,
                    [episode.lease.sampling_seed for episode in episodes],
                )
        async with asyncio.TaskGroup() as tasks:
            for episode, segment in zip(episodes, segments, strict=bool(segments)):
                tasks.create_task(self._play_contained(episode, segment))

    def _prompt(self, observation: str, episode: Episode) -> list[int]:
        prompt_ids = self._chat.prompt([{"role": "user", "content": observation}])
        if len(prompt_ids) + episode.turn_budget > self._max_context:
            raise EpisodeFailure(
                f"prompt_too_long: {len(prompt_ids)} prompt tokens + {episode.turn_budget} new ones "
                f"exceed model.max_context {self._max_context}"
            )
        return prompt_ids

    async def _play_on(self, episode: Episode, saved: Trajectory) -> None:
        """Go on with a single-turn episode that another worker had begun."""
        with episode.contained():
            if self._prompt(episode.observation, episode) != saved.turns[0].observation_ids:
                raise EpisodeFailure("the same seed shows another first observation: the episode cannot go on here")
            episode.go_on_from(saved)
            await self._play(episode, await self._generate(episode, episode.grant))
        episode.end()

    async def _play_contained(self, episode: Episode, segment: Segment) -> None:
        with episode.contained():
            await self._play(episode, segment)
        episode.end()

    async def _play(self, episode: Episode, segment: Segment) -> None:
        while True:
            finished = await episode.complete(segment, partial(self._go_on, episode))
            action = [token for part in episode.turns[-1].segments for token in part.token_ids]
            episode.text = self._chat.decode(action, skip_special=True)
            observation, reward, terminated, truncated = await self._step(episode)
            episode.reward += 0.0 if self._env.penalize_truncation and not finished else float(reward)
            if truncated or not finished:
                episode.status = "truncated"
            if terminated or truncated:
                return
            if not self._observe(episode, observation, finished=finished):
                episode.status = "truncated"
                return
            segment = await self._generate(episode, await self._next_grant(episode, unfinished=False))

    async def _go_on(self, episode: Episode) -> Segment:
        """The next segment of a cut answer."""
        return await self._generate(episode, await self._next_grant(episode, unfinished=True))

    async def _step(self, episode: Episode) -> tuple[str, float, bool, bool]:
        result = call(episode.env, "step", episode.text)
        if inspect.isawaitable(result):
            async with spending([episode], **STEP):
                result = await result
        observation, reward, terminated, truncated, _ = result
        check_step(observation, reward)
        return observation, reward, terminated, truncated

    def _observe(self, episode: Episode, observation: str, *, finished: bool) -> bool:
        """Open the next turn. False if there is no room, no budget or no turn left for another action."""
        budget = episode.turn_budget
        if len(episode.turns) >= self._env.max_turns or budget <= 0:
            return False
        observation_ids = self._chat.continuation([{"role": "user", "content": observation}], ended=finished)
        if len(episode.context) + len(observation_ids) + budget > self._max_context:
            return False
        episode.open_turn(observation_ids)
        return True

    async def _next_grant(self, episode: Episode, *, unfinished: bool) -> SegmentGrant:
        return await self._grants.request(episode.trajectory(), unfinished=unfinished, num_tokens=episode.num_tokens)

    async def _generate(self, episode: Episode, grant: SegmentGrant) -> Segment:
        async with spending([episode], **ANSWER):
            return await self._policy_segment(episode, grant)

    async def _policy_segment(self, episode: Episode, grant: SegmentGrant) -> Segment:
        seeds = [episode.lease.sampling_seed]  # the engine mixes in the position: a cut answer goes on as if uncut
        grants = [episode.within_budget(grant)]
        (segment,) = await self._policy.generate(episode.context, grants, episode.sampling, seeds)
        return segment


def _is_agent(env: object) -> bool:
    return hasattr(env, "play")
