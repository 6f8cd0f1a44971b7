"""Worked examples for the warm start: an environment's own expert plays it, in the tokens the policy will see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

from penstock.config import ConfigError
from penstock.envs.origin import described
from penstock.model.chat import ChatTokenizer
from penstock.ports import Environment
from penstock.types import Task, stable_seed


@runtime_checkable
class Expert(Protocol):
    """An environment that knows what to do."""

    def demonstrate(self) -> str:
        """A good action for the present state."""
        ...


class Tasks(Protocol):
    def next(self) -> Task | None: ...


def demonstrations(
    tasks: Tasks,
    *,
    make: Callable[[Task], Environment],
    max_turns: Callable[[Task], int],
    chat: ChatTokenizer,
    seed: int,
) -> Iterator[tuple[list[int], list[int]]]:
    """Yields (token_ids, loss_mask) per episode of at most `max_turns`, as long as there are tasks; the mask is 1 on
    the expert's tokens."""
    while (task := tasks.next()) is not None:
        env: Any = make(task)
        try:
            _check_expert(env)
            example = _episode(env, chat, max_turns(task), seed=stable_seed(seed, "demonstration", task.index))
        except ConfigError:
            raise
        except Exception as error:
            where = f"model.warm_start: {type(env).__name__} failed while it demonstrated task {task.task_id}"
            raise ConfigError(f"{where}: {described(error)}") from error
        finally:
            if hasattr(env, "close"):
                env.close()
        yield example


def _check_expert(env: object) -> None:
    if not isinstance(env, Expert):
        raise ConfigError(
            f"model.warm_start needs an environment with demonstrate(); {type(env).__name__} has none: "
            "set model.warm_start.steps to 0 or use a trained model"
        )


def _episode(env: Any, chat: ChatTokenizer, max_turns: int, *, seed: int) -> tuple[list[int], list[int]]:
    observation, _ = env.reset(seed)
    token_ids = chat.prompt([{"role": "user", "content": observation}])
    mask = [0] * len(token_ids)
    for turn in range(1, max_turns + 1):
        action = env.demonstrate()
        if not isinstance(action, str):
            raise ConfigError(f"model.warm_start: {type(env).__name__}.demonstrate returned {action!r}, not a string")
        action_ids = [*chat.encode(action), chat.eos_ids[0]]
        token_ids, mask = token_ids + action_ids, mask + [1] * len(action_ids)
        observation, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated or turn == max_turns:
            break
        observed = chat.continuation([{"role": "user", "content": observation}], ended=True)
        token_ids, mask = token_ids + observed, mask + [0] * len(observed)
    return token_ids, mask
