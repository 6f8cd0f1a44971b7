"""Demonstrations for the warm start: the environment's own expert plays it, in the tokens that the policy will see."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from penstock.config import ConfigError
from penstock.envs.dialogue import Style, checked, messages_of, text_of
from penstock.envs.exception_location import described
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Environment
from penstock.seeding import stable_seed
from penstock.types import Task

MOST_LEFT_OUT = 1000
"""Number of demonstrations in a row that may be left out."""
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
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (token_ids, loss_mask) for one episode per task, until `next_task` returns None. An episode has at most
    `max_turns` turns; one of more than `max_context` tokens is left out. The mask is 1 on the expert's tokens. `noise`:
    the fraction of actions that are replaced by an action of an earlier demonstration. Raises `ConfigError` if an
    environment cannot demonstrate or fails."""
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
            shown = _episode(env, chat, max_turns(task), mistakes, seed_of_task, max_context)
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
        yield shown


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


def _episode(
    env: Any, chat: ChatTokenizer, turns: int, mistakes: _Mistakes, seed: int, max_context: int | None
) -> tuple[list[int], list[int]]:
    """Raises `_TooLong`, also for a text before its tokens are made: they would take memory and time."""

    def check(text: str, num_tokens: int) -> None:
        if max_context is not None and (num_tokens > max_context or len(text) > max_context * chat.longest_token):
            raise _TooLong

    style = Style.of(env)
    observation, _ = env.reset(seed)
    opening = style.opening(checked(observation))
    check(text_of(opening), 0)
    token_ids = chat.prompt(opening, **style.settings)
    mask = [0] * len(token_ids)
    for turn in range(1, turns + 1):
        action = env.demonstrate()
        if not isinstance(action, str):
            raise ConfigError(f"model.warm_start: {type(env).__name__}.demonstrate returned {action!r}, not a string")
        action = mistakes.replaced(action)
        action_ids = [*chat.encode_answer(action), chat.eos_ids[0]]
        said = style.action(chat, action, token_ids)
        token_ids, mask = token_ids + action_ids, mask + [1] * len(action_ids)
        check("", len(token_ids))
        observation, _, terminated, truncated, _ = env.step(said)
        if terminated or truncated or turn == turns:
            break
        messages = messages_of(checked(observation))
        check(text_of(messages), len(token_ids))
        observed = chat.continuation(messages, ended=True, **style.settings)
        token_ids, mask = token_ids + observed, mask + [0] * len(observed)
    return token_ids, mask
