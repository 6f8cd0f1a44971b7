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

A reward reads text that the policy wrote. So its worker runs in a sandbox (`penstock.sandbox`): without the network,
without environment variables, and with no files but the installed packages and copies of the Python files that lie
beside the reward or in packages there. The attribute `confined = False` of a class or a function states that the reward
needs more than that and is safe with any text. `executes_answers = True` states that it may run the answer as code.
Then each answer is scored in a process of its own, forked from the worker. An answer that ends this process or the
worker, or forges a result, earns `timeout_reward`, or 0 if the class sets none. So does one that makes `score` fail, if
the class has a method `check(payload)`, which raises an exception for a task that cannot be scored. `part_names` and
`reward_range` state which parts the results have, and their lowest and highest reward.
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
from penstock.envs.discovery import declares, is_coroutine, is_function
from penstock.envs.options import check_exists, check_written, source_of, suggestion
from penstock.redaction import redacted

BUILT_IN = {
    "math": "penstock.envs.rewards.math:Math",
    "format": "penstock.envs.rewards.format:Format",
    "code": "penstock.envs.rewards.code:Code",
    "judge": "penstock.envs.rewards.judge:Judge",
    "reasoning_gym": "penstock.envs.rewards.dataset_rule:DatasetRule",
}
MOST_PARTS = 64
"""Most parts of a reward, and most characters in the name of one."""
LARGEST = 1e6
"""Largest absolute value of a reward, and of a part. Sums and squares of such rewards stay finite."""


class RewardResult(msgspec.Struct, frozen=True, kw_only=True):
    """A reward with its parts."""

    reward: float
    parts: dict[str, float] = {}
    """Parts of the reward by name. The environment worker's counters include their sums."""


class Reward(Protocol):
    """A reward as the module docstring describes it. May have `timeout_reward`, `max_concurrent`, `confined`,
    `executes_answers`, `check`, `part_names` and `reward_range`."""

    def score(self, answer: str, payload: Mapping[str, Any]) -> Any: ...


class _Function:
    """A function as a `Reward`."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.score = functools.partial(function, **options)
        self.timeout_reward: float | None = getattr(function, "timeout_reward", None)
        self.confined: bool = getattr(function, "confined", True)


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


def reads_in_sandbox(name: str) -> bool:
    """Return whether a reward's worker runs in a sandbox, as far as its source shows. Nothing is imported."""
    where, attribute = locate_reward(name)
    file = source_of(where)
    return file is None or not (is_coroutine(file, attribute) or declares(file, attribute, "confined", value=False))


def make_reward(name: str, options: Mapping[str, Any]) -> Reward:
    """Import and create a reward. Raises `ConfigError`, also for any exception of the user's module."""
    where, attribute = locate_reward(name)
    found = import_named("env.reward", f"{where}:{attribute}", wanted="a function or a class")
    try:
        reward: Reward = found(**options) if isinstance(found, type) else _Function(found, options)
    except ConfigError:
        raise
    except TypeError as error:
        raise ConfigError(f"env.reward_options {redacted(options)} do not fit {name}: {error}") from None
    except Exception as error:
        raise ConfigError(f"env.reward {name!r} cannot be used: {type(error).__name__}: {error}") from error
    if not callable(getattr(reward, "score", None)):
        raise ConfigError(f"env.reward {name!r} is neither a function nor a class with score(answer, payload)")
    return reward


def is_async(reward: Reward) -> bool:
    """Return whether `score` is a coroutine function, so that it runs on the event loop."""
    return inspect.iscoroutinefunction(getattr(reward.score, "func", reward.score))


def is_confined(reward: Reward) -> bool:
    """Return whether the reward runs in a sandbox."""
    return not is_async(reward) and getattr(reward, "confined", True)


def checked_result(value: object) -> RewardResult:
    """Return the result of `score` as a `RewardResult`. Raises ValueError if it contains anything but usable numbers,
    or too many parts."""
    result = value if isinstance(value, RewardResult) else RewardResult(reward=value)  # type: ignore[arg-type]
    if len(result.parts) > MOST_PARTS or any(len(name) > MOST_PARTS or not name.isprintable() for name in result.parts):
        raise ValueError(f"a reward has at most {MOST_PARTS} parts, with printable names of {MOST_PARTS} characters")
    given: dict[str, object] = {"the reward": result.reward, **result.parts}
    for name, number in given.items():
        check_number(name, number)
    return result


def check_number(name: str, number: object) -> float:
    """Return a reward or a part as a float. Raises ValueError unless it is a real number of at most `LARGEST`."""
    try:
        value = float(number) if isinstance(number, numbers.Real) else math.nan
    except OverflowError:
        raise ValueError(f"{name} is larger than {LARGEST:.0f}, and than any float") from None
    if not math.isfinite(value):
        raise ValueError(f"{name} is {number!r}, not a finite number")
    if abs(value) > LARGEST:
        raise ValueError(f"{name} is {number!r}, not a number from {-LARGEST:.0f} to {LARGEST:.0f}")
    return value


def field_of(payload: Mapping[str, Any], key: str) -> Any:
    """Return the value of `key` in the task's payload. Raises ValueError if the task has none."""
    if key not in payload:
        raise ValueError(f"the task has no {key!r}: it has {', '.join(sorted(payload)) or 'nothing'}")
    return payload[key]
