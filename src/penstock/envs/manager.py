"""Plays leased episodes: reset -> decide -> step -> ... -> formulate -> submit.

One trajectory per lease, whatever happens: an exception or a missed deadline in an environment becomes a `failed` one
that names environment, method and task; an episode that is given up an `aborted` one. Only cancellation and a wrong
configuration pass through.

Token-in/token-out: the context of a turn is the token ids already seen plus the ids of the new observation; nothing the
policy said is ever re-tokenised, also if it is shown back. Members that see the same first prompt share one generate
request, unless their group waits for the first few of them only. An answer that is cut, by its grant or by a server
that gave way, waits for its next grant with its environment parked. An episode that has said its last word needs no
place to generate while its reward is computed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from penstock.config import Config
from penstock.envs.agents import Conversation, Gateway, Patience
from penstock.envs.calls import EpisodeFailure, Outcome, Places, World
from penstock.envs.episode import Episode, contained_together, spending
from penstock.envs.origin import LoggedOnce, OnError
from penstock.envs.rewards.scorer import RewardFailure, Scorers
from penstock.model.chat import ChatTokenizer
from penstock.ports import Environment, PolicyClient, Work
from penstock.scheduler.segments import SegmentPolicy
from penstock.types import EpisodeId, Segment, SegmentGrant, StopReason, Task, Trajectory

MakeEnvironment = Callable[[Task], Environment]

Ended = Callable[[Trajectory, str], None]
"""Called with an episode's trajectory and its decoded last action."""

ANSWER = {"resource": "an answer", "holder": "a rollout server"}


class Grants(Protocol):
    """Where an episode gets permission to generate again, and gives it back."""

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        """`unfinished`: its last answer was cut. `num_tokens`: generated so far."""
        ...

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        """It has said its last word, `num_tokens` in all; only its reward is still being computed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Leased episodes to play, and who hears of their ends."""

    work: Work
    ended: Ended
    begun: Mapping[int, Trajectory] = field(default_factory=dict)
    """Members that go on from there."""
    started: Callable[[asyncio.Task[None]], None] = lambda task: None
    """Told of the task that plays them, which may be cancelled."""


class WorkPlayer(Protocol):
    """Who plays: the `EnvManager`, or somebody who waits for others that do."""

    async def play(self, work: Work, ended: Ended, *, begun: Mapping[int, Trajectory] | None = None) -> None:
        """Play every lease; `ended` hears of each episode as soon as it ends. Members in `begun` go on from there."""
        ...


async def run_rollout_loop(player: WorkPlayer, jobs: AsyncIterator[Job]) -> None:
    """Play what comes, all of it at once, until nothing more does. Which episodes are played, and how many, is for the
    scheduler to decide: it hands out leases as there is room for them."""
    async with asyncio.TaskGroup() as playing:
        async for job in jobs:
            job.started(playing.create_task(player.play(job.work, job.ended, begun=job.begun)))


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
        scorers: Scorers | None = None,
        on_error: OnError | None = None,
    ) -> None:
        """`gateway`: for environments that are agents. `scorers`: give the reward where environments do not.
        `on_error`: told of what environments and rewards raise, instead of the log."""
        self._config, self._environments = config, config.environments
        self._max_context = config.model.max_context
        self._make, self._policy, self._grants, self._chat = make, policy, grants, chat
        self._gateway, self._scorers = gateway, scorers
        self._places = Places()
        self._on_error = on_error or LoggedOnce()
        self._wanted = config.dump.foreign_columns
        self._num_drifts = 0

    def counts(self) -> dict[str, float]:
        """Since the start: `drifts`, where text of answers came back and their recorded tokens replaced it, and what
        the scorers count."""
        return {"drifts": self._num_drifts, **(self._scorers.counts() if self._scorers is not None else {})}

    async def play(self, work: Work, ended: Ended, *, begun: Mapping[int, Trajectory] | None = None) -> None:
        """Play every lease; `ended` hears of each episode as soon as it ends. Members in `begun` go on from there."""
        episodes = self._episodes(work, ended)
        try:
            async with asyncio.TaskGroup() as tasks:
                together = []
                for episode in episodes:
                    saved = (begun or {}).get(episode.lease.episode.episode)
                    world = self._world(episode, work.task)
                    if world is None:
                        continue
                    if world.is_agent:
                        tasks.create_task(self._play_agent(episode, world))
                    elif saved is not None or world.is_isolated or work.redundancy:
                        tasks.create_task(self._play_alone(episode, world, saved))
                    else:
                        together.append(episode)
                await self._play_together(together)
        finally:
            for episode in episodes:
                episode.abort()
            await _close_all([episode.world for episode in episodes if episode.world is not None])

    def _episodes(self, work: Work, ended: Ended) -> list[Episode]:
        settings = self._environments.of_task(work.task)
        bounds = SegmentPolicy.from_config(self._config, settings)
        bounds = replace(bounds, max_new_tokens=work.sampling.max_new_tokens)
        scorer = self._scorers.of(settings) if self._scorers is not None else None
        return [
            Episode(
                lease=lease,
                grant=grant,
                task_id=work.task.task_id,
                settings=settings,
                payload=work.task.payload,
                scorer=scorer,
                sampling=work.sampling,
                bounds=bounds,
                turn_timeout_s=settings.turn_timeout_s or math.inf,
                on_end=partial(self._submit, ended),
                wanted=self._wanted,
            )
            for lease, grant in zip(work.leases, work.grants, strict=True)
        ]

    def _submit(self, ended: Ended, episode: Episode) -> None:
        """The one trajectory of a lease."""
        self._num_drifts += episode.num_drifts
        ended(episode.trajectory(), episode.text)

    def _world(self, episode: Episode, task: Task) -> World | None:
        """Its environment; None if it cannot be made."""
        with episode.contained():
            make = partial(self._make, task)
            name = episode.settings.name
            episode.world = World(make, name=name, task_id=task.task_id, places=self._places, on_error=self._on_error)
        return episode.world

    @asynccontextmanager
    async def _to_its_end(self, episode: Episode, world: World) -> AsyncIterator[None]:
        """What happens in the body ends the episode, and its environment."""
        with episode.contained():
            yield
        episode.end()
        await world.close()

    # --- an agent brings its own loop ------------------------------------------------------------------------------

    async def _play_agent(self, episode: Episode, world: World) -> None:
        """The agent plays; what it asks the policy meanwhile are the episode's turns."""
        async with self._to_its_end(episode, world), world.place():
            if self._gateway is None:
                raise EpisodeFailure("this worker has no gateway for agents")
            lease = episode.lease
            patience = Patience(lease.deadline_s, waiter=episode.name)
            conversation = Conversation(
                episode,
                self._chat,
                partial(self._generate_for_agent, patience),
                max_turns=episode.settings.max_turns,
                max_context=self._max_context,
            )
            endpoint = await self._gateway.open(conversation)
            try:
                reward = await patience.bound(world.play(endpoint, lease.env_seed))
            except Exception:
                if not conversation.over:
                    raise
                reward = 0.0  # an agent may well give up when it is told that nothing more can be said
            finally:
                await self._gateway.close(endpoint)
            if not episode.turns:
                raise EpisodeFailure(conversation.over or "the agent never asked the policy anything")
            episode.stop(conversation.stop_reason)
            self._earn(episode, reward, world.holder("play"), finished=not conversation.cut)
            await self._score(episode, finished=not conversation.cut)

    async def _generate_for_agent(self, patience: Patience, episode: Episode, unfinished: bool) -> Segment:
        """The first answer has its grant already."""
        grant = episode.grant
        if unfinished or len(episode.turns) > 1:
            grant = await patience.excuse(self._next_grant(episode, unfinished=unfinished))
        return await self._generate(episode, grant)

    # --- an environment is led through the loop --------------------------------------------------------------------

    async def _play_together(self, episodes: Sequence[Episode]) -> None:
        """Those that begin with the same observation are answered together."""
        async with asyncio.TaskGroup() as resetting:
            for episode in episodes:
                resetting.create_task(self._reset_contained(episode))
        alike: dict[str, list[Episode]] = {}
        for episode in episodes:
            if not episode.ended:
                alike.setdefault(episode.said[0], []).append(episode)
        async with asyncio.TaskGroup() as playing:
            for observation, members in alike.items():
                playing.create_task(self._play_alike(observation, members))

    async def _reset_contained(self, episode: Episode) -> None:
        assert episode.world is not None
        with episode.contained():
            await self._reset(episode, episode.world)

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
                assert episode.world is not None
                tasks.create_task(self._play_contained(episode, episode.world, segment))

    async def _play_contained(self, episode: Episode, world: World, segment: Segment) -> None:
        async with self._to_its_end(episode, world):
            await self._play(episode, world, segment)

    async def _play_alone(self, episode: Episode, world: World, saved: Trajectory | None) -> None:
        """An episode whose start is its own; `saved` is what another worker had played of it, in its only turn."""
        async with self._to_its_end(episode, world):
            await self._reset(episode, world)
            prompt_ids = self._prompt(episode.said[0], episode)
            if saved is None:
                episode.open_turn(prompt_ids)
            elif prompt_ids == saved.turns[0].observation_ids:
                episode.go_on_from(saved)
            else:
                raise EpisodeFailure("the same seed shows another first observation: the episode cannot go on here")
            await self._play(episode, world, await self._generate(episode, episode.grant))

    async def _reset(self, episode: Episode, world: World) -> None:
        await world.enter()
        async with (
            world.place(),
            spending([episode], resource="its first observation", holder=world.holder("reset")),
        ):
            observation, info = await world.reset(episode.lease.env_seed)
        episode.said = [observation]
        episode.hear(info)

    def _prompt(self, observation: str, episode: Episode) -> list[int]:
        prompt_ids = self._chat.prompt([{"role": "user", "content": observation}])
        if len(prompt_ids) + episode.turn_budget > self._max_context:
            raise EpisodeFailure(
                f"prompt_too_long: {len(prompt_ids)} prompt tokens + {episode.turn_budget} new ones "
                f"exceed model.max_context {self._max_context}"
            )
        return prompt_ids

    async def _play(self, episode: Episode, world: World, segment: Segment) -> None:
        """From the first segment of the first answer on: decide, step, observe."""
        while True:
            finished = await episode.complete(segment, partial(self._go_on, episode))
            action = [token for part in episode.turns[-1].segments for token in part.token_ids]
            episode.text = self._chat.decode(action, skip_special=True)
            outcome = await self._step(episode, world)
            self._earn(episode, outcome.reward, world.holder("step"), finished=finished)
            if stop := self._observe(episode, outcome, finished=finished):
                episode.stop(stop)
                break
            segment = await self._generate(episode, await self._next_grant(episode, unfinished=False))
        await self._score(episode, finished=finished)

    async def _go_on(self, episode: Episode) -> Segment:
        """The next segment of a cut answer."""
        return await self._generate(episode, await self._next_grant(episode, unfinished=True))

    async def _step(self, episode: Episode, world: World) -> Outcome:
        async with world.place(), spending([episode], resource="its next observation", holder=world.holder("step")):
            outcome = await world.step(episode.text)
        episode.hear(outcome.info)
        return outcome

    def _earn(self, episode: Episode, reward: float | None, giver: str, *, finished: bool) -> None:
        """What the environment gives for what was said, unless `env.reward` does."""
        if episode.scorer is not None:
            return
        if reward is None:
            raise EpisodeFailure(f"{giver} of {episode.task_id}: no reward: set env.reward")
        episode.reward += 0.0 if episode.settings.penalize_truncation and not finished else reward

    def _observe(self, episode: Episode, outcome: Outcome, *, finished: bool) -> StopReason | None:
        """Open the next turn; or why there is none."""
        episode.said.append(episode.text)
        if not finished:
            episode.status = "truncated"
        if outcome.terminated or outcome.truncated:
            return ("terminated" if outcome.terminated else "truncated") if finished else "max_length"
        if len(episode.turns) >= episode.settings.max_turns:
            return "max_turns"
        observation = episode.news(outcome.observation)
        observation_ids = self._chat.continuation([{"role": "user", "content": observation}], ended=finished)
        budget = episode.turn_budget
        if budget <= 0 or len(episode.context) + len(observation_ids) + budget > self._max_context:
            return "max_length"
        episode.said.append(observation)
        episode.open_turn(observation_ids)
        return None

    async def _score(self, episode: Episode, *, finished: bool) -> None:
        """The reward of the whole episode, if `env.reward` gives it. Nobody waits for it but the episode itself."""
        scorer = episode.scorer
        if scorer is None or (episode.settings.penalize_truncation and not finished):
            return
        self._grants.generated(episode.lease.episode, num_tokens=episode.num_tokens)
        try:
            episode.reward = await scorer.score(episode.text, episode.payload, waiter=episode.name)
        except RewardFailure as error:
            self._on_error(f"reward {scorer.name}", error.__cause__ or error)
            raise EpisodeFailure(f"reward {scorer.name} of {episode.task_id}: {error}") from error

    async def _next_grant(self, episode: Episode, *, unfinished: bool) -> SegmentGrant:
        return await self._grants.request(episode.trajectory(), unfinished=unfinished, num_tokens=episode.num_tokens)

    async def _generate(self, episode: Episode, grant: SegmentGrant) -> Segment:
        seeds = [episode.lease.sampling_seed]  # the engine mixes in the position: a cut answer goes on as if uncut
        grants = [episode.within_budget(grant)]
        async with spending([episode], **ANSWER):
            (segment,) = await self._policy.generate(episode.context, grants, episode.sampling, seeds)
        return segment


async def _close_all(worlds: Sequence[World]) -> None:
    """All of them, also if this is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    for world in worlds:
        try:
            await world.close()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
