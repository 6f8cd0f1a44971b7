"""Calls into environments, which are not ours: sync, async or blocking, and whatever they return is checked."""

from __future__ import annotations

import asyncio
import math
import numbers
from typing import Any

from penstock.ports import Environment


class EpisodeFailure(RuntimeError):
    """An episode cannot go on; becomes the `error` of its trajectory."""


def call(env: Environment, method: str, *args: Any) -> Any:
    """What the method returns, or an awaitable of it. Environments that declare `blocking = True` get a thread."""
    bound = getattr(env, method)
    return asyncio.to_thread(bound, *args) if getattr(env, "blocking", False) else bound(*args)


def check_observation(observation: object) -> str:
    if not isinstance(observation, str):
        raise EpisodeFailure(f"the environment's observation is a {type(observation).__name__}, not a string")
    return observation


def check_step(observation: object, reward: object) -> None:
    check_observation(observation)
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise EpisodeFailure(f"the environment's reward is {reward!r}, not a finite number")
