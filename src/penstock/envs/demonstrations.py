"""Demonstrations for the warm start: the environment's own expert plays it, in the tokens that the policy will see."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.config import ConfigError
from penstock.deadline import deadline
from penstock.envs.agents import Over
from penstock.envs.calls import make_outcome
from penstock.envs.dialogue import Style, checked, messages_of, text_of
from penstock.envs.exception_location import described
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Environment, Observation
from penstock.ports.episode_manager import Answer, EpisodeManager, Outcome
from penstock.seeding import stable_seed
from penstock.types import Task

MOST_LEFT_OUT = 1000
"""Number of demonstrations in a row that may be left out."""
MANAGED_S = 60.0
"""Time limit for the demonstration of an episode by a manager of the user's own."""
EARLIER_ACTIONS = 256
"""Number of the expert's latest actions among which a mistake is chosen."""


def demonstrations(
    next_task: Callable[[], Task | None],
    *,
    make: Callable[[Task], Environment],
    max_turns: Callable[[Task], int],
    chat: ChatTokenizer,
    seed: int,
    noise: float = 0.0,
    max_context: int | None = None,
    manager: Callable[[Task], EpisodeManager | None] = lambda task: None,
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (token_ids, loss_mask) for one episode per task, until `next_task` returns None. An episode has at most
    `max_turns` turns; one of more than `max_context` tokens is left out. The mask is 1 on the expert's tokens. `noise`:
    the fraction of actions that are replaced by an action of an earlier demonstration. If the task has a `manager` of
    the user's own, each answer is an example. Raises `ConfigError` if an environment cannot demonstrate or fails."""
    mistakes, num_left_out = _Mistakes(noise, seed), 0
    for task in iter(next_task, None):
        env: Any = None
        try:
            env = make(task)
            if not hasattr(env, "demonstrate"):
                raise ConfigError(
                    f"model.warm_start needs an environment with demonstrate(); {type(env).__name__} has none: "
                    "set model.warm_start.steps to 0 or use a trained model"
                )
            seed_of_task = stable_seed(seed, "demonstration", task.index)
            show = _Show(env, chat, max_turns(task), mistakes, seed_of_task, max_context)
            own = manager(task)
            shown = [show.episode()] if own is None else show.managed(own, task)
        except ConfigError:
            raise
        except _TooLong as error:
            num_left_out += 1
            if num_left_out == MOST_LEFT_OUT:
                raise ConfigError(
                    f"model.warm_start: {MOST_LEFT_OUT} demonstrations in a row exceed model.max_context {max_context} "
                    f"(the latest is of task {task.task_id}): raise it, or set model.warm_start.steps to 0"
                ) from error
            continue
        except Exception as error:
            who = "the environment" if env is None else type(env).__name__
            where = f"model.warm_start: {who} failed while it demonstrated task {task.task_id}"
            raise ConfigError(f"{where}: {described(error)}") from error
        finally:
            if hasattr(env, "close"):
                env.close()
        num_left_out = 0
        yield from shown


class _Mistakes:
    """Replaces a fraction of the actions by actions that the expert gave before."""

    def __init__(self, fraction: float, seed: int) -> None:
        self._fraction, self._random = fraction, random.Random(stable_seed(seed, "mistakes"))
        self._earlier: deque[str] = deque(maxlen=EARLIER_ACTIONS)

    def replaced(self, action: str) -> str:
        mistaken = self._earlier and self._random.random() < self._fraction
        shown = self._random.choice(self._earlier) if mistaken else action
        self._earlier.append(action)
        return shown


class _TooLong(Exception):
    """A demonstration exceeds the context."""


class _Show:
    """Shows one episode."""

    def __init__(
        self, env: Any, chat: ChatTokenizer, turns: int, mistakes: _Mistakes, seed: int, max_context: int | None
    ) -> None:
        self.env, self.chat, self.turns, self.seed = env, chat, turns, seed
        self.style = Style.of(env)
        self._mistakes, self._max_context = mistakes, max_context

    def check(self, text: str, num_tokens: int) -> None:
        """Raises `_TooLong`, also for a text before its tokens are made: they would take memory and time."""
        most = self._max_context
        if most is not None and (num_tokens > most or len(text) > most * self.chat.longest_token):
            raise _TooLong

    def act(self) -> tuple[str, list[int]]:
        """Return the expert's next action, and its tokens."""
        action = self.env.demonstrate()
        if not isinstance(action, str):
            name = type(self.env).__name__
            raise ConfigError(f"model.warm_start: {name}.demonstrate returned {action!r}, not a string")
        action = self._mistakes.replaced(action)
        return action, [*self.chat.encode_answer(action), self.chat.eos_ids[0]]

    def episode(self) -> tuple[list[int], list[int]]:
        observation, _ = self.env.reset(self.seed)
        opening = self.style.opening(checked(observation))
        self.check(text_of(opening), 0)
        token_ids = self.chat.prompt(opening, **self.style.settings)
        mask = [0] * len(token_ids)
        for turn in range(1, self.turns + 1):
            action, action_ids = self.act()
            said = self.style.action(self.chat, action, token_ids)
            token_ids, mask = token_ids + action_ids, mask + [1] * len(action_ids)
            self.check("", len(token_ids))
            observation, _, terminated, truncated, _ = self.env.step(said)
            if terminated or truncated or turn == self.turns:
                break
            messages = messages_of(checked(observation))
            self.check(text_of(messages), len(token_ids))
            observed = self.chat.continuation(messages, ended=True, **self.style.settings)
            token_ids, mask = token_ids + observed, mask + [0] * len(observed)
        return token_ids, mask

    def managed(self, manager: EpisodeManager, task: Task) -> list[tuple[list[int], list[int]]]:
        """Return an example for each answer of an episode."""
        shown = _Managed(self, task)

        async def play() -> None:
            name = f"{type(manager).__name__}.play"
            async with deadline(MANAGED_S, waiter=task.task_id, resource="its demonstration", holder=name):
                await manager.play(shown)

        try:
            asyncio.run(play())
        except* Over:
            pass  # the manager asked for more turns than there are
        return shown.examples


class _Managed:
    """A `ManagedEpisode` in which the expert answers. Each call first lets other tasks run, so that the deadline can
    end a manager that tries again and again."""

    def __init__(self, show: _Show, task: Task) -> None:
        self.task, self.seed, self.max_turns = task, show.seed, show.turns
        self.examples: list[tuple[list[int], list[int]]] = []
        self._show = show

    async def reset(self) -> tuple[Observation, Mapping[str, Any]]:
        await asyncio.sleep(0)
        observation, info = self._show.env.reset(self.seed)
        return checked(observation), info

    async def answer(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **settings: Any
    ) -> Answer:
        await asyncio.sleep(0)
        if len(self.examples) == self.max_turns:
            raise Over("max_turns", "the demonstration has used its turns")
        show = self._show
        asked = messages_of(checked(list(messages)))
        show.check(text_of(asked), 0)
        prompt_ids = show.chat.prompt(asked, **show.style.settings | settings)
        text, token_ids = show.act()
        show.check("", len(prompt_ids) + len(token_ids))
        self.examples.append((prompt_ids + token_ids, [0] * len(prompt_ids) + [1] * len(token_ids)))
        action = show.style.action(show.chat, text, prompt_ids)
        turn = len(self.examples) - 1
        return Answer(turn=turn, text=text, action=action, token_ids=token_ids, is_finished=True)

    async def step(self, answer: Answer, action: str | None = None) -> Outcome:
        await asyncio.sleep(0)
        return make_outcome(self._show.env.step(answer.action if action is None else action))

    def earn(self, answer: Answer, reward: float) -> None:
        """Do nothing: nothing is rewarded here."""

    def train_only(self, answer: Answer, tokens: Sequence[bool]) -> None:
        """Do nothing: all of an answer is imitated."""
