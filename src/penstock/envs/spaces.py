"""Gymnasium's observation and action spaces as text, for the policy to read and write.

Observations are written in Python's notation: `3`, `[0.12, -1.5]`, `(7, 10, 0)`. A dictionary has one line per key. The
action is read from the end of an answer, so that a policy may think before it acts. It is the last action name in the
answer, or the last numbers, as many as the space needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from penstock.config import ConfigError

MAX_NUMBERS = 1024
"""Maximum size of an observation or action. A larger array is an image, which text cannot show."""
DIGITS = 4
"""Significant digits of a real number."""

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def check_observations(space: Space[Any]) -> None:
    """Raise `ConfigError` for an observation space without a textual form."""
    match space:
        case Tuple(spaces=parts):
            for part in parts:
                check_observations(part)
        case Dict(spaces=parts):
            for part in parts.values():
                check_observations(part)
        case Text() | Discrete():
            pass
        case Box() | MultiDiscrete() | MultiBinary() if _size(space) <= MAX_NUMBERS:
            pass
        case _:
            raise ConfigError(
                f"the observation space {space} has no textual form: wrap the environment in a "
                "gymnasium.ObservationWrapper that returns text"
            )


def write(value: Any) -> str:
    """Return an observation or an action as text."""
    match value:
        case str():
            return value
        case dict():
            return "\n".join(f"{key}: {write(part)}" for key, part in value.items())
        case tuple():
            return f"({', '.join(map(write, value))})"
        case np.ndarray():
            return write(value.tolist())
        case list():
            return f"[{', '.join(map(write, value))}]"
        case float() | np.floating():
            return f"{value:.{DIGITS}g}"
        case _:
            return str(value)


class Actions:
    """Describes, reads and writes the actions of one space."""

    def __init__(self, space: Space[Any], names: Sequence[str] = ()) -> None:
        """`names`: names of a discrete space's actions, in order. Raises `ConfigError` if they do not fit the space, or
        if the space has no textual form."""
        self._space, self._names = space, [name.lower() for name in names]
        if names and not (isinstance(space, Discrete) and space.n == len(names)):
            raise ConfigError(f"env.options.action_names {list(names)} do not fit the action space {space}")
        self.description, self._read = self._named() if names else _reader(space)

    def _named(self) -> tuple[str, Callable[[str], Any]]:
        start = int(self._space.start)  # type: ignore[attr-defined]
        longest_first = sorted(self._names, key=len, reverse=True)
        pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in longest_first))

        def read(answer: str) -> Any:
            found = pattern.findall(answer.lower())
            if not found:
                raise ValueError
            return np.int64(start + self._names.index(found[-1]))

        return f"one of {', '.join(self._names)}", read

    def read(self, answer: str) -> Any:
        """Return the action in `answer`. Raises ValueError if it contains none."""
        try:
            with np.errstate(over="raise"):
                action = self._read(answer)
        except (ValueError, ArithmeticError):  # numbers too large for the space's type are ArithmeticErrors
            action = None
        if action is None or not self._space.contains(action):
            raise ValueError(f"an action is {self.description}")
        return action

    write_observation = staticmethod(write)

    def write(self, action: Any) -> str:
        """Return the text that `read` reads as this action."""
        if self._names:
            return self._names[int(action) - int(self._space.start)]  # type: ignore[attr-defined]
        return write(action)


def _reader(space: Space[Any]) -> tuple[str, Callable[[str], Any]]:
    """Return the description of an action, and the function that reads one. Raises `ConfigError` for an action space
    without a textual form."""
    match space:
        case Text():
            return "a text", lambda answer: answer
        case Discrete(n=n, start=start):
            return f"a whole number from {start} to {start + n - 1}", lambda answer: np.int64(_last(answer, 1, int)[0])
        case Box() | MultiDiscrete() | MultiBinary() if _size(space) <= MAX_NUMBERS:
            size, shape, dtype = _size(space), space.shape, space.dtype
            kind, called = (float, "numbers") if isinstance(space, Box) else (int, "whole numbers")

            def read(answer: str) -> Any:
                return np.asarray(_last(answer, size, kind), dtype=dtype).reshape(shape)

            return f"{size} {called}{_bounds(space)}", read
        case _:
            raise ConfigError(
                f"the action space {space} has no textual form: wrap the environment in a gymnasium.ActionWrapper "
                "that takes a text, a number or an array of numbers"
            )


def _bounds(space: Space[Any]) -> str:
    match space:
        case MultiDiscrete(nvec=nvec, start=start):
            pairs = zip(start.flatten().tolist(), nvec.flatten().tolist(), strict=True)
            return f", from {write([low for low, _ in pairs])} to {write((start + nvec - 1).flatten().tolist())}"
        case MultiBinary():
            return ", each 0 or 1"
        case Box(low=low, high=high):
            return f", from {write(low.flatten())} to {write(high.flatten())}"
        case _:
            return ""


def _last(answer: str, count: int, kind: type[int] | type[float]) -> list[int] | list[float]:
    """Return the last `count` numbers of an answer. Raises ValueError if there are fewer, or if one is infinite, and
    OverflowError if one is too large."""
    numbers = [kind(number) for number in NUMBER.findall(answer)[-count:]]
    if len(numbers) < count or not all(map(math.isfinite, numbers)):
        raise ValueError
    return numbers


def _size(space: Space[Any]) -> int:
    return int(np.prod(space.shape or ()))
