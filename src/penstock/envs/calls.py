"""Calls into environments, which are not ours: on the event loop, in threads or in other processes.

Whatever they raise or return that no environment may is an `EpisodeFailure` that names environment, method and task.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import numbers
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.config import ConfigError
from penstock.deadline import deadline, placed
from penstock.envs.hosted import awaited
from penstock.envs.origin import LoggedOnce, OnError, described
from penstock.envs.threads import in_thread
from penstock.types import Endpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S = 5.0
"""For an environment to put its things away."""
SHOWN_CHARACTERS = 120
"""Of what a method returned instead of what it should."""


class EpisodeFailure(RuntimeError):
    """An episode cannot go on; becomes the `error` of its trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an action."""

    observation: str
    reward: float | None
    """None: the environment leaves it to `env.reward`."""
    terminated: bool
    """The world came to an end."""
    truncated: bool
    """The environment would not go on, though its world could."""
    info: Mapping[str, Any]
    """Whatever it tells beside."""


class Places:
    """How many calls into environments of one class may run at once: what the class says in `max_concurrent`."""

    def __init__(self) -> None:
        self._free: dict[type, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def one(self, kind: type, *, waiter: str) -> AsyncIterator[None]:
        """For the length of the body."""
        limit: int | None = getattr(kind, "max_concurrent", None)
        if limit is None:
            yield
            return
        free = self._free.setdefault(kind, asyncio.Semaphore(limit))
        holder = f"{limit} others (max_concurrent)"
        async with placed(free, waiter=waiter, resource=f"a place in {kind.__name__}", holder=holder):
            yield


class World:
    """The environment of one episode.

    One that says `blocking = True` gets a thread per call, one that says `isolated = True` a process of its own; others
    run on the event loop, where they must not hold others up. With `max_concurrent` a class says how many calls, or
    processes, there may be at once.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        name: str,
        task_id: str,
        places: Places,
        on_error: OnError | None = None,
    ) -> None:
        """`on_error`: told of whatever it raises, but for its own end."""
        self._task_id, self._places = task_id, places
        self._on_error = on_error or LoggedOnce()
        self._name = name
        self._closed = False
        self._env: Any = None
        with self._blamed("__init__"):
            self._env = make()
        self._name = getattr(self._env, "class_name", type(self._env).__name__)

    @property
    def is_agent(self) -> bool:
        """It brings its own loop."""
        return hasattr(self._env, "play")

    @property
    def is_isolated(self) -> bool:
        """It has a process of its own, for which it has to wait."""
        return getattr(self._env, "has_own_process", False) is True

    def holder(self, method: str) -> str:
        """Who holds what is waited for, while that method runs."""
        return f"{self._name}.{method}"

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Every call is made inside one; waiting for it costs an episode none of its time."""
        async with self._places.one(type(self._env), waiter=self._task_id):
            yield

    async def enter(self) -> None:
        """Wait for its process, if it has one."""
        if self.is_isolated:
            await self._env.enter()

    async def reset(self, seed: int) -> tuple[str, Mapping[str, Any]]:
        """The first observation, and what is told beside it."""
        with self._blamed("reset"):
            return _first_observation(await call_async(self._env, "reset", seed))

    async def step(self, action: str) -> Outcome:
        with self._blamed("step"):
            return _outcome(await call_async(self._env, "step", action))

    async def play(self, llm: Endpoint, seed: int) -> float | None:
        """Of an agent: the reward. None: it leaves that to `env.reward`."""
        with self._blamed("play"):
            return check_reward(await call_async(self._env, "play", llm, seed))

    async def close(self) -> None:
        """Once; an environment without `close` has nothing to put away. What goes wrong is told, and harms nobody."""
        if self._closed or not hasattr(self._env, "close"):
            return
        self._closed = True
        try:
            async with deadline(CLOSE_S, waiter=self._task_id, resource="its end", holder=self.holder("close")):
                with self._blamed("close"):
                    await call_async(self._env, "close")
        except (EpisodeFailure, TimeoutError) as error:
            logger.warning("%s", error)

    @contextmanager
    def _blamed(self, method: str) -> Iterator[None]:
        """The boundary to code that is not ours: it may raise anything at all."""
        where = f"{self.holder(method)} of {self._task_id}"
        try:
            yield
        except (ConfigError, KeyboardInterrupt, GeneratorExit):
            raise
        except EpisodeFailure as error:
            raise EpisodeFailure(f"{where}: {error}") from None
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            self._on_error(self.holder(method), error)
            raise EpisodeFailure(f"{where}: {described(error)}") from error


async def call_async(env: object, method: str, *args: Any) -> Any:
    """What the method returns in the end. A plain one of an environment that is `blocking` gets a thread."""
    function = getattr(env, method)
    if getattr(env, "blocking", False) and not inspect.iscoroutinefunction(function):
        result = await in_thread(function, *args, name=f"{type(env).__name__}.{method}")
    else:
        result = function(*args)
    return await awaited(result)


def _is_cancelled() -> bool:
    """Whether somebody cancels this very task, instead of something in it having said so."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _first_observation(result: object) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise EpisodeFailure(f"returned {_shown(result)}, not (observation, info)")
    return _checked_observation(result[0]), _checked_info(result[1])


def _outcome(result: object) -> Outcome:
    if not isinstance(result, tuple | list) or len(result) != 5:
        raise EpisodeFailure(f"returned {_shown(result)}, not (observation, reward, terminated, truncated, info)")
    observation, reward, terminated, truncated, info = result
    return Outcome(
        observation=_checked_observation(observation),
        reward=check_reward(reward),
        terminated=_checked_flag("terminated", terminated),
        truncated=_checked_flag("truncated", truncated),
        info=_checked_info(info),
    )


def _shown(result: object) -> str:
    return repr(result)[:SHOWN_CHARACTERS]


def _checked_observation(observation: object) -> str:
    if not isinstance(observation, str):
        raise EpisodeFailure(f"the observation is a {type(observation).__name__}, not a string")
    return observation


def _checked_info(info: object) -> Mapping[str, Any]:
    """Nobody depends on it: what is none tells nothing."""
    return info if isinstance(info, Mapping) else {}


def _checked_flag(name: str, flag: object) -> bool:
    """Any boolean, numpy's too."""
    if type(flag).__name__ not in ("bool", "bool_"):
        raise EpisodeFailure(f"{name} is {flag!r}, not a boolean")
    return bool(flag)


def check_reward(reward: object) -> float | None:
    """Any finite real number, or none at all."""
    if reward is None:
        return None
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise EpisodeFailure(f"the reward is {reward!r}, not a finite number")
    return float(reward)
