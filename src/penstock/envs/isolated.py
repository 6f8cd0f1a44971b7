"""Environments that declare `isolated = True`: each episode's in a process of its own, killed with it if it hangs."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import EnvConfig
from penstock.envs.hosts import Host, Hosts
from penstock.envs.registry import FILE_MODULE, environment_maker, resolve
from penstock.ports import Environment
from penstock.types import Task

NUM_PROCESSES = 8
"""At once in a worker, unless the class says otherwise in `max_concurrent`."""
WORKSHOP = f"{__name__}:Workshop"


class Workshop:
    """In the other process: imports the class once, then holds one environment after the other."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self._make = environment_maker(EnvConfig(name=name, options=options), resolve(name))
        self._environment: Any = None

    async def reset(self, task: dict[str, Any], seed: int) -> Any:
        """Of a new environment."""
        self._environment = self._make(msgspec.convert(task, Task))
        return _portable(await _ended(self._environment.reset(seed)))

    async def step(self, action: str) -> Any:
        return _portable(await _ended(self._environment.step(action)))

    async def close(self) -> None:
        if hasattr(self._environment, "close"):
            await _ended(self._environment.close())
        self._environment = None


async def _ended(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _portable(result: Any) -> Any:
    """Whatever of its `info` is no plain value stays here."""
    if not isinstance(result, tuple) or not result or not isinstance(result[-1], dict):
        return result
    return (*result[:-1], {str(key): value for key, value in result[-1].items() if _is_plain(value)})


def _is_plain(value: Any) -> bool:
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


class IsolatedEnvironment:
    """`Environment` in another process."""

    def __init__(self, task: Task, *, class_name: str, hosts: Hosts) -> None:
        self.class_name = class_name
        self._task, self._hosts = task, hosts
        self._host: Host | None = None

    async def enter(self) -> None:
        """Wait until there is a process for it."""
        self._host = await self._hosts.take(waiter=self._task.task_id)

    async def reset(self, seed: int) -> Any:
        return await self._entered.call("reset", msgspec.to_builtins(self._task), seed)

    async def step(self, action: str) -> Any:
        return await self._entered.call("step", action)

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
async def making(config: EnvConfig, kind: type[Environment]) -> AsyncIterator[Callable[[Task], Environment]]:
    """Makes one environment of `kind` per episode, here or in processes that live as long as the body."""
    if not getattr(kind, "isolated", False):
        yield environment_maker(config, kind)
        return
    found = importable_name(kind), dict(config.options)
    hosts = Hosts(getattr(kind, "max_concurrent", NUM_PROCESSES), prepare=lambda host: host.make(WORKSHOP, *found))
    make: Any = partial(IsolatedEnvironment, class_name=kind.__name__, hosts=hosts)
    try:
        yield make
    finally:
        await hosts.close()


def importable_name(kind: type) -> str:
    """What another process finds the class by."""
    module = kind.__module__
    if module == "__main__" or module.startswith(FILE_MODULE):
        return f"{Path(inspect.getfile(kind)).absolute()}:{kind.__qualname__}"
    return f"{module}:{kind.__qualname__}"
