"""An environment that is looked at while it is played: what it shows, hears and answers."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol

Told = Callable[[Any], None]


class Audience(Protocol):
    """Hears what happens, in order. Of environments that declare `blocking = True`, from their threads."""

    def observed(self, observation: object) -> None:
        """What the environment shows."""
        ...

    def acted(self, action: str) -> None:
        """What it is given."""
        ...

    def stepped(self, reward: object, terminated: object, truncated: object, info: object) -> None:
        """What it answers beside the next observation."""
        ...

    def returned(self, method: str, result: object) -> None:
        """It returned something that the method must not return."""
        ...


class Watched:
    """Any environment or agent, with an audience; whatever is not told is passed on as it is."""

    def __init__(self, env: Any, audience: Audience) -> None:
        self._env, self._audience = env, audience

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._env, name)
        return partial(self._call, "play", told=self._tell_play) if name == "play" else found

    @property
    def class_name(self) -> str:
        """Of the environment."""
        return str(getattr(self._env, "class_name", type(self._env).__name__))

    def reset(self, seed: int) -> Any:
        return self._call("reset", seed, told=self._tell_reset)

    def step(self, action: str) -> Any:
        self._audience.acted(action)
        return self._call("step", action, told=self._tell_step)

    def _tell_play(self, reward: Any) -> None:
        self._audience.stepped(reward, True, False, {})

    def _tell_reset(self, result: Any) -> None:
        if not _is_tuple(result, 2):
            self._audience.returned("reset", result)
            return
        self._audience.observed(result[0])

    def _tell_step(self, result: Any) -> None:
        if not _is_tuple(result, 5):
            self._audience.returned("step", result)
            return
        observation, reward, terminated, truncated, info = result
        self._audience.stepped(reward, terminated, truncated, info)
        self._audience.observed(observation)

    def _call(self, method: str, *args: Any, told: Told) -> Any:
        result = getattr(self._env, method)(*args)
        if inspect.isawaitable(result):
            return self._later(result, told)
        told(result)
        return result

    async def _later(self, result: Awaitable[Any], told: Told) -> Any:
        found = await result
        told(found)
        return found


def _is_tuple(result: object, length: int) -> bool:
    return isinstance(result, tuple | list) and len(result) == length
