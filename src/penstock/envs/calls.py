"""Calls into environments, which are not ours: sync, async or blocking, and whatever they return is checked."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import sys
from typing import Any

from penstock.deadline import deadline

CLOSE_S = 10.0


class EpisodeFailure(RuntimeError):
    """An episode cannot go on; becomes the `error` of its trajectory."""


def call(env: object, method: str, *args: Any) -> Any:
    """What the method returns, or an awaitable of it. Environments that declare `blocking = True` get a thread."""
    bound = getattr(env, method)
    return asyncio.to_thread(bound, *args) if getattr(env, "blocking", False) else bound(*args)


async def call_async(env: object, method: str, *args: Any) -> Any:
    """What the method returns in the end."""
    result = call(env, method, *args)
    return await result if inspect.isawaitable(result) else result


async def close(env: object) -> None:
    """Let it give up what it holds, if it knows how to. Its episode is over, so that a failure is only told."""
    if not hasattr(env, "close"):
        return
    try:
        async with deadline(CLOSE_S, waiter="environment worker", resource="its end", holder=type(env).__name__):
            await call_async(env, "close")
    except Exception as error:
        print(f"warning: {type(env).__name__}.close: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def check_observation(observation: object) -> str:
    if not isinstance(observation, str):
        raise EpisodeFailure(f"the environment's observation is a {type(observation).__name__}, not a string")
    return observation


def check_step(observation: object, reward: object) -> None:
    check_observation(observation)
    check_reward(reward)


def check_reward(reward: object) -> None:
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise EpisodeFailure(f"the environment's reward is {reward!r}, not a finite number")
