"""What a reward is: a class with `score(answer, payload)`, or a function of that shape.

    class Length:
        def __init__(self, *, best: int = 100) -> None:       # env.reward_options
            self._best = best

        def score(self, answer: str, payload: dict[str, Any]) -> float:
            return min(len(answer) / self._best, 1.0)

`answer` is what the policy said last, `payload` the task's. A plain `score` runs in a reward worker, a process of its
own that is killed if it takes longer than `env.reward_timeout_s`; an `async` one, for rewards that ask others, on the
event loop, at most `max_concurrent` at once if it has that, and its `close`, if it has one, is awaited in the end. Who
waits for a process or a place has not begun: that costs a score none of its time. Too long a score fails the episode,
unless the class says what it is worth: `timeout_reward = 0.0`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from penstock.config import ConfigError
from penstock.config.imports import NoSuchName, is_there, load

BUILT_IN = {
    "math": "penstock.envs.rewards.math:Math",
    "format": "penstock.envs.rewards.format:Format",
    "code": "penstock.envs.rewards.code:Code",
    "judge": "penstock.envs.rewards.judge:Judge",
}


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """A reward, and what it is made of."""

    reward: float
    parts: dict[str, float] = {}
    """By name; their sums are among the counters of the environment worker."""


class Reward(Protocol):
    """See above. May have `timeout_reward` and `max_concurrent`."""

    def score(self, answer: str, payload: Mapping[str, Any]) -> Any: ...


class _Function:
    """A function as a `Reward`."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.score = functools.partial(function, **options)
        self.timeout_reward: float | None = getattr(function, "timeout_reward", None)


def locate_reward(name: str) -> tuple[str, str]:
    """(module or file, attribute) of a name or an import path, importing neither. Raises `ConfigError`."""
    path = BUILT_IN.get(name, name)
    where, separator, attribute = path.rpartition(":")
    if not separator:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        known = f"known are {', '.join(BUILT_IN)}, or file.py:Class, or package.module:Class"
        raise ConfigError(f"unknown reward {name!r} in env.reward: {f'did you mean {near[0]}?' if near else known}")
    try:
        there = is_there(where)
    except (ImportError, ValueError):
        there = False
    if not there:
        raise ConfigError(f"env.reward {name!r}: there is no {where}")
    return where, attribute


def make_reward(name: str, options: Mapping[str, Any]) -> Reward:
    """Raises `ConfigError`, whatever goes wrong in the user's module."""
    where, attribute = locate_reward(name)
    try:
        found = load(f"{where}:{attribute}")
        reward: Reward = found(**options) if isinstance(found, type) else _Function(found, options)
    except NoSuchName as error:
        raise ConfigError(f"env.reward {name!r}: {error}") from None
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
    """Whether it is scored on the event loop."""
    return inspect.iscoroutinefunction(getattr(reward.score, "func", reward.score))


def checked_result(value: object) -> RewardResult:
    """What `score` returned. Raises ValueError."""
    result = value if isinstance(value, RewardResult) else RewardResult(reward=value)  # type: ignore[arg-type]
    given: dict[str, object] = {"the reward": result.reward, **result.parts}
    for name, number in given.items():
        if not isinstance(number, numbers.Real) or not math.isfinite(number):
            raise ValueError(f"{name} is {number!r}, not a finite number")
    return result


def field_of(payload: Mapping[str, Any], key: str) -> Any:
    """Raises ValueError if the task has none."""
    if key not in payload:
        raise ValueError(f"the task has no {key!r}: it has {', '.join(sorted(payload)) or 'nothing'}")
    return payload[key]
