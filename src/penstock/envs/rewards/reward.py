"""The interface of a reward: a class with `score(answer, payload)`, or a function with these two arguments.

    class Length:
        def __init__(self, *, best: int = 100) -> None:       # env.reward_options
            self._best = best

        def score(self, answer: str, payload: dict[str, Any]) -> float:
            return min(len(answer) / self._best, 1.0)

`answer` is the policy's last answer, and `payload` is the task's. A plain `score` runs in a reward worker: a separate
process, which is killed if the score takes longer than `env.reward_timeout_s`. An `async` score is for rewards that
call other services. It runs on the event loop, at most `max_concurrent` calls at a time if the class sets that, and the
reward's `close`, if it has one, is awaited at the end. Waiting for a process or a place does not count against the time
limit. A score that takes too long fails the episode, unless the class sets a reward for it: `timeout_reward = 0.0`.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from penstock.config import ConfigError
from penstock.config.imports import import_named
from penstock.envs.discovery import is_function
from penstock.envs.options import check_exists, check_written, source_of, suggestion

BUILT_IN = {
    "math": "penstock.envs.rewards.math:Math",
    "format": "penstock.envs.rewards.format:Format",
    "code": "penstock.envs.rewards.code:Code",
    "judge": "penstock.envs.rewards.judge:Judge",
}


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """A reward with its parts."""

    reward: float
    parts: dict[str, float] = {}
    """Parts of the reward by name. The environment worker's counters include their sums."""


class Reward(Protocol):
    """A reward as the module docstring describes it. May have `timeout_reward` and `max_concurrent`."""

    def score(self, answer: str, payload: Mapping[str, Any]) -> Any: ...


class _Function:
    """A function as a `Reward`."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.score = functools.partial(function, **options)
        self.timeout_reward: float | None = getattr(function, "timeout_reward", None)


def locate_reward(name: str) -> tuple[str, str]:
    """Return (module or file, attribute) of a name or an import path, without importing it. Raises `ConfigError` if
    there is no such module or file."""
    path = BUILT_IN.get(name, name)
    where, separator, attribute = path.rpartition(":")
    if not separator:
        known = f"known are {', '.join(BUILT_IN)}, or file.py:Class, or package.module:Class"
        raise ConfigError(f"unknown reward {name!r} in env.reward: {suggestion(name, BUILT_IN, known)}")
    check_exists("env.reward", name, where)
    return where, attribute


def check_reward(key: str, name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a reward does not exist, or if its source shows that it does not accept `options`. `key`:
    the setting that holds the options."""
    where, attribute = locate_reward(name)
    file = source_of(where)
    num_given = 2 if file is not None and is_function(file, attribute) else 0
    check_written(key, (where, attribute), options, num_given=num_given)


def make_reward(name: str, options: Mapping[str, Any]) -> Reward:
    """Import and create a reward. Raises `ConfigError`, also for any exception of the user's module."""
    where, attribute = locate_reward(name)
    found = import_named("env.reward", f"{where}:{attribute}", wanted="a function or a class")
    try:
        reward: Reward = found(**options) if isinstance(found, type) else _Function(found, options)
    except ConfigError:
        raise
    except TypeError as error:
        raise ConfigError(f"env.reward_options {dict(options)} do not fit {name}: {error}") from None
    except Exception as error:
        raise ConfigError(f"env.reward {name!r} cannot be used: {type(error).__name__}: {error}") from error
    if not callable(getattr(reward, "score", None)):
        raise ConfigError(f"env.reward {name!r} is neither a function nor a class with score(answer, payload)")
    return reward


def is_async(reward: Reward) -> bool:
    """Return whether `score` is a coroutine function, so that it runs on the event loop."""
    return inspect.iscoroutinefunction(getattr(reward.score, "func", reward.score))


def checked_result(value: object) -> RewardResult:
    """Return the result of `score` as a `RewardResult`. Raises ValueError if it contains anything but finite
    numbers."""
    result = value if isinstance(value, RewardResult) else RewardResult(reward=value)  # type: ignore[arg-type]
    given: dict[str, object] = {"the reward": result.reward, **result.parts}
    for name, number in given.items():
        if not isinstance(number, numbers.Real) or not math.isfinite(number):
            raise ValueError(f"{name} is {number!r}, not a finite number")
    return result


def field_of(payload: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key` in the task's payload. Raises ValueError if the task has none."""
    if key not in payload:
        raise ValueError(f"the task has no {key!r}: it has {', '.join(sorted(payload)) or 'nothing'}")
    return payload[key]
