"""Episodes that a manager of the user plays (`ports/episode_manager.py`).

Each call first lets other tasks run. So a manager that tries again and again does not hold up the worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.deadline import deadline
from penstock.envs.agents import Conversation, Over, PausableTimeout
from penstock.envs.calls import EpisodeEnvironment
from penstock.envs.dialogue import EpisodeFailure, checked, messages_of, num_characters
from penstock.envs.episode import Episode, spending
from penstock.envs.rewards.reward import check_number
from penstock.model.answer_format import LAST_TOKENS
from penstock.model.chat import ChatTokenizer
from penstock.model.text_threads import INLINE_CHARACTERS, in_text_thread
from penstock.ports.environment import Observation
from penstock.ports.episode_manager import Answer, Outcome
from penstock.types import StopReason

END_S = 60.0
"""Time limit for calls to end that a manager has left behind."""


class OwnManaged:
    """The `ManagedEpisode` of a worker."""

    def __init__(
        self,
        episode: Episode,
        environment: EpisodeEnvironment,
        conversation: Conversation,
        timeout: PausableTimeout,
        chat: ChatTokenizer,
    ) -> None:
        self.task, self.seed, self.max_turns = episode.task, episode.lease.env_seed, episode.settings.max_turns
        self._episode, self._environment, self._conversation = episode, environment, conversation
        self._timeout, self._chat = timeout, chat
        self._last: Outcome | None = None
        self._inside: list[asyncio.Task[Any]] = []
        """Tasks that wait in a call of this object."""
        self._is_empty = asyncio.Event()
        self._is_over = self._has_entered = False
        self._given: dict[int, Answer] = {}
        """Answers by their turns."""
        self.env_error: Exception | None = None
        """What the environment has raised, or a deadline while it worked: it cannot go on, whatever the manager
        does."""
        self._raised: list[BaseException] = []
        """What the environment, a server or a deadline has raised here; not the manager."""
        self.num_untrained = 0
        """Number of sampled tokens that the manager leaves out of the training."""

    @property
    def stop_reason(self) -> StopReason:
        """Why the episode ends, if its manager plays on no further."""
        if self._conversation.cut or self._last is None or not (self._last.terminated or self._last.truncated):
            return self._conversation.stop_reason
        return "terminated" if self._last.terminated else "truncated"

    def has_raised(self, error: BaseException) -> bool:
        """Return whether an exception that a manager has not caught, or all of a group, was raised here."""
        if isinstance(error, BaseExceptionGroup):
            return all(map(self.has_raised, error.exceptions))
        return any(error is each for each in self._raised)

    @asynccontextmanager
    async def _working(self, holder: str, resource: str) -> AsyncIterator[None]:
        """Charge the environment's time to the episode, and note that it failed."""
        try:
            async with spending([self._episode], resource=resource, holder=holder):
                yield
        except Exception as error:
            self.env_error = error
            raise

    async def close(self) -> None:
        """Cancel the calls that still run, of tasks that the manager has left behind. Later calls are refused."""
        self._is_over = True
        for task in self._inside:
            task.cancel()
        if self._inside:
            async with deadline(END_S, waiter=self._episode.name, resource="its last call", holder="its manager"):
                await self._is_empty.wait()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Note the task that is inside, and what is raised there."""
        if self._is_over:
            raise EpisodeFailure("the episode has ended")
        task = asyncio.current_task()
        assert task is not None
        self._inside.append(task)
        self._is_empty.clear()
        try:
            yield
        except BaseException as error:
            self._raised.append(error)
            raise
        finally:
            self._inside.remove(task)
            if not self._inside:
                self._is_empty.set()

    async def reset(self) -> tuple[Observation, Mapping[str, Any]]:
        await asyncio.sleep(0)
        with self._call():
            return await self._reset()

    async def _reset(self) -> tuple[Observation, Mapping[str, Any]]:
        if not self._has_entered:
            self._has_entered = True
            await self._timeout.paused(self._environment.enter())
        async with AsyncExitStack() as stack:
            await self._timeout.paused(stack.enter_async_context(self._environment.slot()))
            holder = self._environment.holder("reset")
            async with self._working(holder, "its first observation"):
                observation, info = await self._environment.reset(self.seed)
        self._episode.hear(info)
        return observation, info

    async def answer(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **settings: Any
    ) -> Answer:
        await asyncio.sleep(0)
        asked = messages_of(checked(list(messages)))
        settings = self._environment.style.settings | settings
        render = partial(self._conversation.prompt, asked, **settings)
        size, limit = num_characters([*asked, settings]), self._conversation.max_context * self._chat.longest_token
        most = self._episode.settings.max_new_tokens if max_tokens is None else max_tokens
        if most < 1:
            raise EpisodeFailure(f"answer: max_tokens is {most}, expected at least 1")
        with self._call():
            if size > limit:  # making its tokens would take long
                message = f"the prompt has {size} characters, and model.max_context has room for {limit}"
                self._conversation.exceeded(message)
                raise Over("max_length", message)
            is_short = size <= INLINE_CHARACTERS
            prompt_ids, request = render() if is_short else await in_text_thread(render, waiter=self._episode.name)
            turn, said = await self._conversation.answer(prompt_ids, most, request)
        text = self._chat.decode(said.token_ids, skip_special=True)
        answer = Answer(
            turn=turn,
            text=text,
            action=self._environment.style.action(self._chat, text, prompt_ids[-LAST_TOKENS:]),
            token_ids=said.token_ids,
            is_finished=said.finish_reason == "stop",
        )
        self._given[answer.turn] = answer
        return answer

    async def step(self, answer: Answer, action: str | None = None) -> Outcome:
        await asyncio.sleep(0)
        turn = self._turn_of(answer)
        with self._call():
            outcome = await self._step(turn, answer.action if action is None else action)
        if self._episode.scorer is None and outcome.reward is not None:
            is_paid = answer.is_finished or not self._episode.settings.penalize_truncation
            self._episode.earn(outcome.reward if is_paid else 0.0, turn=turn)
        return outcome

    async def _step(self, turn: int, action: str) -> Outcome:
        async with AsyncExitStack() as stack:
            await self._timeout.paused(stack.enter_async_context(self._environment.slot()))
            holder = self._environment.holder("step")
            stack.enter_context(self._episode.executing(turn, action))
            async with self._working(holder, "its next observation"):
                outcome = self._last = await self._environment.step(action)
        self._episode.hear(outcome.info)
        if self._episode.scorer is None and outcome.reward is None:
            raise EpisodeFailure(f"{holder} of {self.task.task_id}: no reward: set env.reward")
        return outcome

    def earn(self, answer: Answer, reward: float) -> None:
        turn = self._turn_of(answer)
        try:
            self._episode.earn(check_number("the reward", reward), turn=turn)
        except ValueError as error:
            raise EpisodeFailure(str(error)) from None

    def train_only(self, answer: Answer, tokens: Sequence[bool]) -> None:
        turn = self._episode.turns[self._turn_of(answer)]
        if len(tokens) != len(turn.token_ids):
            raise EpisodeFailure(f"train_only: {len(tokens)} flags for an answer of {len(turn.token_ids)} tokens")
        before = 0 if turn.trained is None else turn.trained.count(False)
        trained = [bool(flag) for flag in tokens]
        self.num_untrained += trained.count(False) - before
        self._episode.turns[answer.turn] = replace(turn, trained=trained)

    def _turn_of(self, answer: Answer) -> int:
        """Return the turn of an answer. Raises `EpisodeFailure` if the episode has ended, or has not given it."""
        if self._is_over:
            raise EpisodeFailure("the episode has ended")
        if self._given.get(answer.turn) is not answer:
            raise EpisodeFailure(f"answer {answer.turn} is none that this episode has given")
        return answer.turn
