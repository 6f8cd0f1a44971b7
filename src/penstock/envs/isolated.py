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
from penstock.config.imports import FILE_MODULE
from penstock.envs.hosted import awaited
from penstock.envs.hosts import Host, Hosts
from penstock.envs.info import plain
from penstock.envs.registry import environment_maker, maker_by_tag, resolve
from penstock.ports import Environment
from penstock.types import Task

NUM_PROCESSES = 8
"""At once in a worker, unless the class says otherwise in `max_concurrent`."""
WORKSHOP = f"{__name__}:Workshop"


class Workshop:
    """In the other process: imports the class once, then holds one environment after the other. An `info` may be
    anything: what is wanted of it leaves, as JSON has it."""

    def __init__(self, name: str, wanted: list[str] | None) -> None:
        """`wanted`: names of the `info` that leave; None: all."""
        self._name, self._kind, self._wanted = name, resolve(name), wanted
        self._environment: Any = None

    async def reset(self, task: dict[str, Any], options: dict[str, Any], seed: int) -> Any:
        """Of a new environment."""
        make = environment_maker(EnvironmentConfig(name=self._name, options=options), self._kind)
        self._environment = make(msgspec.convert(task, Task))
        return self._portable(await awaited(self._environment.reset(seed)))

    async def step(self, action: str) -> Any:
        return self._portable(await awaited(self._environment.step(action)))

    async def demonstrate(self) -> Any:
        return await awaited(self._environment.demonstrate())

    async def close(self) -> None:
        if hasattr(self._environment, "close"):
            await awaited(self._environment.close())
        self._environment = None

    def _portable(self, result: Any) -> Any:
        """With what is wanted of its `info`."""
        if not isinstance(result, tuple) or not result or not isinstance(result[-1], dict):
            return result
        info = result[-1]
        wanted = list(info) if self._wanted is None else self._wanted
        return (*result[:-1], {str(name): plain(info[name]) for name in wanted if name in info})


class IsolatedEnvironment:
    """`Environment` in another process."""

    has_own_process = True

    def __init__(self, task: Task, *, class_name: str, options: dict[str, Any], hosts: Hosts) -> None:
        self.class_name = class_name
        self._task, self._options, self._hosts = task, options, hosts
        self._host: Host | None = None

    async def enter(self) -> None:
        """Wait until there is a process for it."""
        self._host = await self._hosts.take(waiter=self._task.task_id)

    async def reset(self, seed: int) -> Any:
        return await self._entered.call("reset", msgspec.to_builtins(self._task), self._options, seed)

    async def step(self, action: str) -> Any:
        return await self._entered.call("step", action)

    async def demonstrate(self) -> Any:
        return await self._entered.call("demonstrate")

    async def close(self) -> None:
        """Give the process to others, or what is left of it."""
        host, self._host = self._host, None
        if host is None:
            return
        try:
            if host.is_sound:
                await host.call("close")
        finally:
            self._hosts.give_back(host)

    @property
    def _entered(self) -> Host:
        assert self._host is not None, "enter() comes first"
        return self._host


@asynccontextmanager
async def making(
    config: Config, kinds: Mapping[str, type[Environment]], *, whole_info: bool = False
) -> AsyncIterator[Callable[[Task], Environment]]:
    """Makes the environment that a task's tag asks for, one per episode, of `kinds` (by name): here, or in processes
    that live as long as the body. `whole_info`: all of it leaves these, not only what is dumped."""
    hosts: dict[type[Environment], Hosts] = {}
    wanted = None if whole_info else sorted(config.dump.foreign_columns)

    def maker(settings: EnvironmentConfig, kind: type[Environment]) -> Callable[[Task], Any]:
        if not getattr(kind, "isolated", False):
            return environment_maker(settings, kind)
        if kind not in hosts:
            limit, name = getattr(kind, "max_concurrent", NUM_PROCESSES), importable_name(kind)
            hosts[kind] = Hosts(limit, prepare=lambda host: host.make(WORKSHOP, name, wanted))
        options = dict(settings.options)
        return partial(IsolatedEnvironment, class_name=kind.__name__, options=options, hosts=hosts[kind])

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
