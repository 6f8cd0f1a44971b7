"""Plays leased episodes: reset -> decide -> step -> ... -> formulate -> submit.

Every lease ends in exactly one trajectory. An exception or a missed deadline in an environment gives a `failed`
trajectory that names the environment, method and task. An episode that is given up gives an `aborted` trajectory. Only
cancellation and configuration errors pass through.

Token-in/token-out: the context of a turn is the token ids already seen plus the ids of the new observation. The
policy's answers are never tokenised again, even if an environment shows them back. Members of a group with the same
first prompt share one generate request, unless the group has redundant members and waits only for the first ones to
end. A grant or an interrupting server can cut an answer; the episode then keeps its environment and waits for its next
grant. While the reward of an episode is computed, the episode holds no place for generation.

The loop of an episode is the one here, that of an agent (`play`), or that of the user's own manager (`env.manager`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Protocol

import msgspec

from penstock.config import Config
from penstock.config.secret_settings import resolved
from penstock.envs.agents import Conversation, Gateway, Over, PausableTimeout
from penstock.envs.calls import ConcurrencyLimit, EpisodeEnvironment, blamed
from penstock.envs.dialogue import EpisodeFailure, Message, PromptTooLong, messages_of, num_characters, text_of
from penstock.envs.episode import Episode, OpenTurn, answering, contained_together, spending
from penstock.envs.exception_location import LoggedOnce, OnError
from penstock.envs.managed import OwnManaged
from penstock.envs.rewards.scorer import RewardFailure, Scorers
from penstock.envs.shared_grant import SharedGrant
from penstock.model.answer_format import LAST_TOKENS
from penstock.model.chat import ChatTokenizer
from penstock.model.text_threads import INLINE_CHARACTERS, in_text_thread
from penstock.ports.environment import Action, Environment, PolicyClient
from penstock.ports.episode_manager import EpisodeManager, Outcome
from penstock.ports.work import Work
from penstock.samples import Segment, Trajectory
from penstock.scheduler.segments import SegmentPolicy
from penstock.types import EpisodeId, SegmentGrant, StopReason, Task

MakeEnvironment = Callable[[Task], Environment]

Ended = Callable[[Trajectory, str], None]
"""Called with an episode's trajectory and its decoded last action."""

Convert = Callable[..., list[int]]
"""Returns the token ids of messages."""

logger = logging.getLogger(__name__)

MOST_KINDS, MAX_KIND_CHARS = 64, 60
"""Most kinds of refusals that a worker logs. Two messages are of one kind if they begin alike, but for digits."""
ANSWER = {"resource": "an answer", "holder": "a rollout server"}


class Grants(Protocol):
    """Source of further grants for an episode."""

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        """Wait for the episode's next grant. `unfinished`: the last answer was cut. `num_tokens`: number of tokens
        generated so far."""

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        """Report that the episode has generated all its tokens, `num_tokens` in total. Only its reward is still being
        computed."""


class WorkPlayer(Protocol):
    """Plays work: the `EnvManager`, or the `Exchange`, which waits for programs outside."""

    async def play(self, work: Work, ended: Ended, *, begun: Mapping[int, Trajectory] | None = None) -> None:
        """Play every lease, and call `ended` as soon as an episode ends. Members in `begun` continue from these
        trajectories."""


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
        managers: Mapping[str, Callable[..., EpisodeManager]] | None = None,
        on_error: OnError | None = None,
    ) -> None:
        """`gateway`: endpoints for environments that are agents. `scorers`: compute rewards outside the environment.
        `managers`: classes of the user's own managers, by `env.manager`. `on_error`: receives the exceptions of
        environments and rewards, instead of the log."""
        self._config, self._environments = config, config.environments
        self._max_context = config.model.max_context
        self._max_characters = self._max_context * chat.longest_token
        self._make, self._policy, self._grants, self._chat = make, policy, grants, chat
        self._gateway, self._scorers, self._managers = gateway, scorers, managers or {}
        self._on_error = on_error or LoggedOnce()
        self._make_environment = partial(EpisodeEnvironment, limit=ConcurrencyLimit(), on_error=self._on_error)
        self._wanted = config.kept_info
        self._num_drifts = self._num_refused = self._num_branches = self._num_off_branch = 0
        self._num_masked = self._num_unread = 0
        self._told_refusals: set[str] = set()

    def counts(self) -> dict[str, float]:
        """Return counters since the start, and those of the scorers.

        - `drifts`: how often recorded tokens replaced repeated text of answers.
        - `branches` of episodes, without the first one of each.
        - `off_branch_tokens`: sampled tokens that `env.formulation` does not train.
        - `manager_masked_tokens`: sampled tokens that the user's own manager leaves out.
        - `unread_calls`: answers that call a tool in a format that the worker does not read.
        - `refused_requests` of agents.
        """
        own: dict[str, float] = {
            "drifts": self._num_drifts,
            "branches": self._num_branches,
            "off_branch_tokens": self._num_off_branch,
            "manager_masked_tokens": self._num_masked,
            "unread_calls": self._num_unread,
            "refused_requests": self._num_refused,
        }
        return own | (self._scorers.counts() if self._scorers is not None else {})

    async def play(self, work: Work, ended: Ended, *, begun: Mapping[int, Trajectory] | None = None) -> None:
        """Play every lease, and call `ended` as soon as an episode ends. Members in `begun` continue from these
        trajectories."""
        episodes = self._episodes(work, ended)
        try:
            async with asyncio.TaskGroup() as tasks:
                together = []
                for episode in episodes:
                    saved = (begun or {}).get(episode.lease.episode.episode)
                    with episode.contained():
                        make, name = partial(self._make, work.task), episode.settings.name
                        episode.environment = self._make_environment(make, name=name, task_id=work.task.task_id)
                    if episode.ended:  # its environment could not be created
                        continue
                    environment = episode.environment
                    if environment.is_agent:
                        tasks.create_task(self._play_agent(episode, environment))
                    elif episode.settings.manager is not None:
                        tasks.create_task(self._play_managed(episode, environment))
                    elif saved is not None or environment.is_isolated or work.redundancy:
                        tasks.create_task(self._play_alone(episode, environment, saved))
                    else:
                        together.append(episode)
                await self._play_together(together)
        finally:
            for episode in episodes:
                episode.abort()
            async with AsyncExitStack() as closing:  # closes all environments, even if this task is cancelled meanwhile
                for episode in episodes:
                    if episode.environment is not None:
                        closing.push_async_callback(episode.environment.close)

    def _episodes(self, work: Work, ended: Ended) -> list[Episode]:
        settings = self._environments.of_task(work.task)
        bounds = SegmentPolicy.from_config(self._config, settings)
        bounds = replace(bounds, max_new_tokens=work.sampling.max_new_tokens)
        scorer = self._scorers.of(settings, work.task.payload) if self._scorers is not None else None
        return [
            Episode(
                lease=lease,
                grant=grant,
                task=work.task,
                settings=settings,
                scorer=scorer,
                sampling=work.sampling,
                records_experts=self._config.replays_routers and work.task.purpose == "train",
                bounds=bounds,
                on_end=partial(self._submit, ended),
                wanted=self._wanted,
            )
            for lease, grant in zip(work.leases, work.grants, strict=True)
        ]

    def _submit(self, ended: Ended, episode: Episode) -> None:
        """Report the lease's only trajectory."""
        trajectory = episode.trajectory()
        self._num_drifts += episode.num_drifts
        if len(branches := trajectory.branches()) > 1:
            self._num_branches += len(branches) - 1
            if self._config.env.formulation == "trajectory":
                self._num_off_branch += trajectory.num_tokens - sum(
                    len(trajectory.turns[index].token_ids) for index in branches[-1]
                )
        ended(trajectory, episode.text)

    @asynccontextmanager
    async def _to_its_end(self, episode: Episode, environment: EpisodeEnvironment) -> AsyncIterator[None]:
        """End the episode and close its environment after the body. An exception of the body fails the episode."""
        with episode.contained():
            yield
        episode.end()
        await environment.close()

    # --- an agent brings its own loop ------------------------------------------------------------------------------

    async def _play_agent(self, episode: Episode, environment: EpisodeEnvironment) -> None:
        """Let the agent play. Its requests to the policy become the episode's turns."""
        async with self._to_its_end(episode, environment), environment.slot():
            if self._gateway is None:
                raise EpisodeFailure("this worker has no gateway for agents")
            lease = episode.lease
            timeout = PausableTimeout(lease.deadline_s, waiter=episode.name)
            shared = self._shared_grant(episode, timeout)
            generate = partial(self._generate_for_agent, shared)
            conversation = Conversation(episode, self._chat, generate, max_context=self._max_context)
            endpoint = await self._gateway.open(conversation)
            close = partial(self._gateway.close, endpoint)
            try:
                reward = await timeout.run(environment.play(endpoint, lease.env_seed), close)
            except Exception:
                if not conversation.over:
                    raise
                reward = 0.0  # an agent may raise when it is told that no turn or token is left
            finally:
                await shared.close()
                self._count_refusals(conversation)
                self._num_unread += conversation.num_unread
            if not episode.turns:
                said = conversation.over or (conversation.refusals or ["the agent sent no request to the policy"])[0]
                raise EpisodeFailure(said)
            if conversation.refusals and self._config.env.refused_requests == "fail":
                raise EpisodeFailure(f"the endpoint refused a request of the agent: {conversation.refusals[0]}")
            episode.stop(conversation.stop_reason)
            self._earn(episode, reward, environment.holder("play"), finished=not conversation.cut)
            await self._score(episode, finished=not conversation.cut)
            if environment.gives_credit and not (conversation.cut and episode.settings.penalize_truncation):
                conversations = conversation.texts()
                async with spending([episode], resource="its credits", holder=environment.holder("credit")):
                    episode.credits = await environment.credit(episode.reward, conversations)

    async def _play_managed(self, episode: Episode, environment: EpisodeEnvironment) -> None:
        """Let the user's own manager play."""
        async with self._to_its_end(episode, environment):
            timeout = PausableTimeout(episode.lease.deadline_s, waiter=episode.name)
            shared = self._shared_grant(episode, timeout)
            generate = partial(self._generate_for_agent, shared)
            conversation = Conversation(episode, self._chat, generate, max_context=self._max_context)
            played = OwnManaged(episode, environment, conversation, timeout, self._chat)
            name = episode.settings.manager or ""

            async def play() -> None:
                where, on_error = f"{name}.play of {episode.task.task_id}", partial(self._on_error, f"{name}.play")
                with blamed(where, on_error, is_ours=played.has_raised):
                    options = resolved(episode.settings.manager_options, "env.manager_options")
                    await self._managers[name](**options).play(played)

            try:
                await timeout.run(play(), played.close)
            except* Over:
                pass  # a manager may raise when it is told that no turn or token is left
            finally:
                await shared.close()
                self._num_masked += played.num_untrained
                self._num_unread += conversation.num_unread
            if played.env_error is not None:
                raise played.env_error
            if not episode.turns:
                raise EpisodeFailure(conversation.over or f"{name}.play asked the policy for no answer")
            episode.stop(played.stop_reason)
            await self._score(episode, finished=not conversation.cut)

    def _count_refusals(self, conversation: Conversation) -> None:
        """Count the refused requests of an episode, and log each kind of message once."""
        self._num_refused += conversation.num_refused
        for message in conversation.refusals:
            kind = "".join(character for character in message if not character.isdigit())[:MAX_KIND_CHARS]
            if kind not in self._told_refusals and len(self._told_refusals) < MOST_KINDS:
                self._told_refusals.add(kind)
                logger.warning("the endpoint refused a request of an agent: %s", message)

    def _shared_grant(self, episode: Episode, timeout: PausableTimeout) -> SharedGrant:
        async def request(unfinished: bool) -> SegmentGrant:
            return await timeout.paused(self._next_grant(episode, unfinished=unfinished))

        return SharedGrant(episode.grant, request, waiter=episode.name)

    async def _generate_for_agent(self, shared: SharedGrant, turn: OpenTurn) -> Segment:
        """Generate the next segment of an agent's answer."""
        turn.grant, grant = await shared.begin(turn.grant)
        try:
            return await self._generate(turn, grant)
        finally:
            shared.end()

    # --- the manager runs the loop of an environment ---------------------------------------------------------------

    async def _play_together(self, episodes: Sequence[Episode]) -> None:
        """Play the episodes. Those with the same first observation share their first request."""
        async with asyncio.TaskGroup() as resetting:
            for episode in episodes:
                resetting.create_task(self._reset_contained(episode))
        alike: dict[bytes, list[Episode]] = {}
        for episode in episodes:
            if not episode.ended:
                alike.setdefault(msgspec.json.encode(episode.opening), []).append(episode)
        async with asyncio.TaskGroup() as playing:
            for members in alike.values():
                playing.create_task(self._play_alike(members))

    async def _reset_contained(self, episode: Episode) -> None:
        assert episode.environment is not None
        with episode.contained():
            await self._reset(episode, episode.environment)

    async def _play_alike(self, episodes: list[Episode]) -> None:
        """Play episodes with the same first observation: one shared first request, then each episode by itself."""
        turns, segments = list[OpenTurn](), list[Segment]()
        with contained_together(episodes):
            prompt_ids = await self._prompt(episodes[0])
            turns = [self._open_turn(episode, prompt_ids) for episode in episodes]
            with answering(episodes):
                async with spending(episodes, **ANSWER):
                    segments = await self._policy.generate(
                        prompt_ids,
                        [turn.within_budget(turn.episode.grant) for turn in turns],
                        turns[0].sampling,
                        [turn.sampling_seed for turn in turns],
                    )
        async with asyncio.TaskGroup() as tasks:
            for turn, segment in zip(turns, segments, strict=bool(segments)):
                assert turn.episode.environment is not None
                tasks.create_task(self._play_contained(turn, turn.episode.environment, segment))

    async def _play_contained(self, turn: OpenTurn, environment: EpisodeEnvironment, segment: Segment) -> None:
        async with self._to_its_end(turn.episode, environment):
            await self._play(turn, environment, segment)

    async def _play_alone(self, episode: Episode, environment: EpisodeEnvironment, saved: Trajectory | None) -> None:
        """Play an episode without a shared first request. `saved`: its trajectory from another worker, with a single
        turn, to continue from."""
        async with self._to_its_end(episode, environment):
            await self._reset(episode, environment)
            prompt_ids = await self._prompt(episode)
            turn = self._open_turn(episode, prompt_ids)
            if saved is not None:
                (begun,) = saved.turns
                if prompt_ids != begun.observation_ids:
                    raise EpisodeFailure("the same seed gives another first observation: the episode cannot continue")
                for segment in begun.segments:
                    turn.take(segment)
            await self._play(turn, environment, await self._generate(turn, episode.grant))

    async def _reset(self, episode: Episode, env: EpisodeEnvironment) -> None:
        await env.enter()
        async with env.slot(), spending([episode], resource="its first observation", holder=env.holder("reset")):
            observation, info = await env.reset(episode.lease.env_seed)
        episode.said, episode.opening = [text_of(observation)], env.style.opening(observation)
        episode.hear(info)

    async def _prompt(self, episode: Episode) -> list[int]:
        size = num_characters(episode.opening)
        if size > self._max_characters:  # tokenising it would hold up all other episodes
            raise PromptTooLong(f"prompt_too_long: {size} characters exceed model.max_context {self._max_context}")
        prompt_ids = await self._tokens(self._chat.prompt, episode.opening, episode)
        if len(prompt_ids) >= self._max_context:
            raise PromptTooLong(
                f"prompt_too_long: {len(prompt_ids)} prompt tokens leave no room for an answer in model.max_context "
                f"{self._max_context}"
            )
        return prompt_ids

    async def _tokens(self, convert: Convert, messages: Sequence[Message], episode: Episode) -> list[int]:
        """Return what `convert` makes of an observation. A long one must not hold up the other episodes."""
        assert episode.environment is not None
        render = partial(convert, messages, **episode.environment.style.settings)
        is_short = num_characters(messages) <= INLINE_CHARACTERS
        return render() if is_short else await in_text_thread(render, waiter=episode.name)

    async def _play(self, turn: OpenTurn, environment: EpisodeEnvironment, segment: Segment) -> None:
        """Run the loop from the first segment of the first answer: decide, step, observe."""
        episode = turn.episode
        while True:
            finished = await turn.complete(segment, partial(self._generate_next, turn, unfinished=True))
            turn.close()
            episode.text = self._chat.decode(turn.turn.token_ids, skip_special=True)
            outcome = await self._step(turn, environment)
            self._earn(episode, outcome.reward, environment.holder("step"), finished=finished)
            observed = await self._observe(turn, outcome, finished=finished)
            if not isinstance(observed, OpenTurn):
                episode.stop(observed)
                break
            turn = observed
            segment = await self._generate_next(turn, unfinished=False)
        await self._score(episode, finished=finished)

    async def _generate_next(self, turn: OpenTurn, *, unfinished: bool) -> Segment:
        """Generate the first segment of the next answer, or the next segment of a cut one, with a new grant."""
        return await self._generate(turn, await self._next_grant(turn.episode, unfinished=unfinished))

    async def _step(self, turn: OpenTurn, env: EpisodeEnvironment) -> Outcome:
        episode = turn.episode
        async with env.slot():
            action = env.style.action(self._chat, episode.text, turn.prompt_end(LAST_TOKENS))
            if isinstance(action, Action) and not action.calls:
                self._num_unread += self._chat.answers.foreign_format(action.content) is not None
            with episode.executing(len(episode.turns) - 1, action):
                async with spending([episode], resource="its next observation", holder=env.holder("step")):
                    outcome = await env.step(action)
        episode.hear(outcome.info)
        return outcome

    def _earn(self, episode: Episode, reward: float | None, giver: str, *, finished: bool) -> None:
        """Add the environment's reward for an answer, unless `env.reward` computes the rewards. Raises `EpisodeFailure`
        if neither gives one."""
        if episode.scorer is not None:
            return
        if reward is None:
            raise EpisodeFailure(f"{giver} of {episode.task.task_id}: no reward: set env.reward")
        episode.earn(0.0 if episode.settings.penalize_truncation and not finished else reward)

    async def _observe(self, turn: OpenTurn, outcome: Outcome, *, finished: bool) -> OpenTurn | StopReason:
        """Return the next turn, or why the episode stops."""
        episode = turn.episode
        episode.said.append(episode.text)
        if not finished:
            episode.status = "truncated"
        if outcome.terminated or outcome.truncated:
            return ("terminated" if outcome.terminated else "truncated") if finished else "max_length"
        if len(episode.turns) >= episode.settings.max_turns:
            return "max_turns"
        observed = outcome.observation
        messages = messages_of(episode.news(observed) if isinstance(observed, str) else observed)
        if num_characters(messages) > self._max_characters:
            return "max_length"
        continuation = partial(self._chat.continuation, ended=finished)
        observation_ids = await self._tokens(continuation, messages, episode)
        if episode.turn_budget < 1 or len(turn.context) + len(observation_ids) >= self._max_context:
            return "max_length"
        episode.said.append(text_of(messages))
        return self._open_turn(episode, observation_ids, turn.context)

    def _open_turn(self, episode: Episode, observation_ids: list[int], context: Sequence[int] = ()) -> OpenTurn:
        """Open a turn, and limit its answer to the room that the context has left."""
        return episode.open_turn(observation_ids, self._max_context - len(context) - len(observation_ids))

    async def _score(self, episode: Episode, *, finished: bool) -> None:
        """Compute the reward of the whole episode, if `env.reward` is set. Only this episode waits for it."""
        scorer = episode.scorer
        if scorer is None:
            return
        if episode.settings.penalize_truncation and not finished:
            episode.reward = 0.0
            return
        self._grants.generated(episode.lease.episode, num_tokens=episode.num_tokens)
        now = asyncio.get_running_loop().time
        started = now()
        try:
            episode.reward = await scorer.score(episode.text, episode.task.payload, waiter=episode.name)
        except RewardFailure as error:
            self._on_error(f"reward {scorer.name}", error.__cause__ or error)
            raise EpisodeFailure(f"reward {scorer.name} of {episode.task.task_id}: {error}") from error
        finally:
            episode.rewarding_s += now() - started

    async def _next_grant(self, episode: Episode, *, unfinished: bool) -> SegmentGrant:
        with episode.answering:
            return await self._grants.request(
                episode.trajectory(), unfinished=unfinished, num_tokens=episode.num_tokens
            )

    async def _generate(self, turn: OpenTurn, grant: SegmentGrant) -> Segment:
        episode, grants = turn.episode, [turn.within_budget(grant)]
        seeds = [turn.sampling_seed]  # the engine mixes in the position: a cut does not change the samples
        with episode.answering:
            async with spending([episode], turn, **ANSWER):
                (segment,) = await self._policy.generate(turn.context, grants, turn.sampling, seeds)
        return segment
