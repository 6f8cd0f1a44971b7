"""Environments that declare `isolated = True`: each episode's in a process of its own, killed with it if it hangs."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import Config, EnvironmentConfig
from penstock.envs.hosts import Host, Hosts
from penstock.envs.registry import FILE_MODULE, environment_maker, maker_by_tag, resolve
from penstock.ports import Environment
from penstock.types import Task

NUM_PROCESSES = 8
"""At once in a worker, unless the class says otherwise in `max_concurrent`."""
MAKER = f"{__name__}:make_inside"


class Inside:
    """The environment, in the process that holds it. Its `info` may be anything, and stays there."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    async def reset(self, seed: int) -> Any:
        return _without_info(await _ended(self._environment.reset(seed)))

    async def step(self, action: str) -> Any:
        return _without_info(await _ended(self._environment.step(action)))

    async def close(self) -> None:
        await _ended(self._environment.close())


def make_inside(name: str, options: dict[str, Any], task: dict[str, Any]) -> Inside:
    """Called in the process that is to hold it."""
    config = EnvironmentConfig(name=name, options=options)
    return Inside(environment_maker(config, resolve(name))(msgspec.convert(task, Task)))


async def _ended(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _without_info(result: Any) -> Any:
    return (*result[:-1], {}) if isinstance(result, tuple) and result else result


class IsolatedEnvironment:
    """`Environment` in another process."""

    def __init__(self, task: Task, *, name: str, kind: type, options: dict[str, Any], hosts: Hosts) -> None:
        self.class_name = kind.__name__
        self._task, self._name, self._options, self._hosts = task, name, options, hosts
        self._closes = hasattr(kind, "close")
        self._host: Host | None = None

    async def enter(self) -> None:
        """Wait until there is a process for it."""
        self._host = await self._hosts.take(waiter=self._task.task_id)

    async def reset(self, seed: int) -> Any:
        await self._entered.make(MAKER, self._name, self._options, msgspec.to_builtins(self._task))
        return await self._entered.call("reset", seed)

    async def step(self, action: str) -> Any:
        return await self._entered.call("step", action)

    async def close(self) -> None:
        """Give the process to others, or what is left of it."""
        host, self._host = self._host, None
        if host is None:
            return
        try:
            if self._closes and host.is_sound:
                await host.call("close")
        finally:
            self._hosts.give_back(host)

    @property
    def _entered(self) -> Host:
        assert self._host is not None, "enter() comes first"
        return self._host


@asynccontextmanager
async def making(
    config: Config, kinds: Mapping[str, type[Environment]]
) -> AsyncIterator[Callable[[Task], Environment]]:
    """Makes the environment that a task's tag asks for, one per episode, of `kinds` (by name): here, or in processes
    that live as long as the body."""
    hosts: dict[type, Hosts] = {}

    def maker(settings: EnvironmentConfig, kind: type[Environment]) -> Callable[[Task], Any]:
        if not getattr(kind, "isolated", False):
            return environment_maker(settings, kind)
        own = hosts.setdefault(kind, Hosts(getattr(kind, "max_concurrent", NUM_PROCESSES)))
        name = importable_name(kind)
        return partial(IsolatedEnvironment, name=name, kind=kind, options=settings.options, hosts=own)

    try:
        yield maker_by_tag(config, kinds, maker)
    finally:
        for each in hosts.values():
            await each.close()


def importable_name(kind: type) -> str:
    """What another process finds the class by."""
    module = kind.__module__
    if module == "__main__" or module.startswith(FILE_MODULE):
        return f"{Path(inspect.getfile(kind)).absolute()}:{kind.__qualname__}"
    return f"{module}:{kind.__qualname__}"
