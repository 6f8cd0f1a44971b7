"""Environments that declare `isolated = True`: each running episode has its own process, killed if it hangs."""

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
from penstock.config.secret_settings import resolved
from penstock.envs.dialogue import METRICS, STATE, Style
from penstock.envs.registry import environment_maker, maker_by_tag, resolve
from penstock.envs.worker_calls import awaited, plain
from penstock.envs.worker_pool import WorkerPool, WorkerProcess
from penstock.ports.environment import Action, Environment, ToolCall
from penstock.sendable import encodable
from penstock.types import Task

NUM_PROCESSES = 8
"""Maximum number of processes per class and worker at the same time, unless the class sets `max_concurrent`."""
WORKER = f"{__name__}:IsolatedWorker"


class IsolatedWorker:
    """Holds the environment, inside its own process. It imports the class once and then creates one environment after
    another. Only the wanted keys of an `info` leave the process, in JSON's types."""

    def __init__(self, name: str, wanted: list[str] | None) -> None:
        """`wanted`: keys of the `info` that leave the process. None: all keys."""
        self._name, self._kind, self._wanted = name, resolve(name), wanted
        self._environment: Any = None

    async def reset(self, task: dict[str, Any], options: dict[str, Any], seed: int) -> Any:
        """Create a new environment and return the result of its `reset`."""
        make = environment_maker(EnvironmentConfig(name=self._name, options=options), self._kind)
        self._environment = make(msgspec.convert(task, Task))
        return self._portable(await awaited(self._environment.reset(seed)))

    async def step(self, action: str, said: dict[str, Any] | None) -> Any:
        """Return the result of the environment's `step`. `said`: what an `Action` says, if the action is one."""
        if said is not None:
            calls = [ToolCall(*call) for call in said["calls"]]
            action = Action(action, **{**said, "calls": calls})
        return self._portable(await awaited(self._environment.step(action)))

    async def demonstrate(self) -> Any:
        return await awaited(self._environment.demonstrate())

    async def close(self) -> None:
        if hasattr(self._environment, "close"):
            await awaited(self._environment.close())
        self._environment = None

    def _portable(self, result: Any) -> Any:
        """Return the result with its `info` reduced to the wanted keys, in JSON's types. A result of another shape is
        returned unchanged."""
        if not isinstance(result, tuple) or not result or not isinstance(result[-1], dict):
            return result
        said, info = result[0], result[-1]
        wanted = list(info) if self._wanted is None else self._wanted
        shown = encodable(said) if isinstance(said, str) else plain(said)
        return (shown, *result[1:-1], {str(name): plain(info[name]) for name in wanted if name in info})


class IsolatedEnvironment:
    """An `Environment` that runs in another process."""

    has_own_process = True

    def __init__(
        self, task: Task, *, class_name: str, style: Style, options: dict[str, Any], workers: WorkerPool
    ) -> None:
        self.class_name, self.system, self.tools = class_name, style.system, style.tools
        self.metric_kinds = style.metric_kinds
        self._task, self._options, self._workers = task, options, workers
        self._worker: WorkerProcess | None = None

    async def enter(self) -> None:
        """Wait until the pool has a process for this environment."""
        self._worker = await self._workers.take(waiter=self._task.task_id)

    async def reset(self, seed: int) -> Any:
        return await self._entered.call("reset", msgspec.to_builtins(self._task), self._options, seed)

    async def step(self, action: str) -> Any:
        said = vars(action) if isinstance(action, Action) else None
        return await self._entered.call("step", str(action), said)

    async def demonstrate(self) -> Any:
        return await self._entered.call("demonstrate")

    async def close(self) -> None:
        """Close the environment and give the process back to the pool."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        try:
            if worker.is_sound:
                await worker.call("close")
        finally:
            self._workers.give_back(worker)

    @property
    def _entered(self) -> WorkerProcess:
        assert self._worker is not None, "enter() comes first"
        return self._worker


@asynccontextmanager
async def making(
    config: Config, kinds: Mapping[str, type[Environment]], *, whole_info: bool = False
) -> AsyncIterator[Callable[[Task], Environment]]:
    """Yield a function that makes the environment for a task, as the task's tag selects it, once per episode. `kinds`:
    environment classes by name. Isolated environments run in processes that end with the body. `whole_info`: their
    whole `info` leaves the process, instead of only its metrics, its state and `Config.kept_info`."""
    pools: dict[type[Environment], WorkerPool] = {}
    kept = None if whole_info else config.kept_info
    wanted = None if kept is None else sorted(kept | {METRICS, STATE})

    def maker(settings: EnvironmentConfig, kind: type[Environment]) -> Callable[[Task], Any]:
        if not getattr(kind, "isolated", False):
            return environment_maker(settings, kind)
        if kind not in pools:
            limit, name = getattr(kind, "max_concurrent", NUM_PROCESSES), importable_name(kind)
            pools[kind] = WorkerPool(limit, WORKER, name, wanted)
        options = resolved(settings.options, "env.options")
        style = Style.of(kind)
        return partial(IsolatedEnvironment, class_name=kind.__name__, style=style, options=options, workers=pools[kind])

    try:
        yield maker_by_tag(config, kinds, maker)
    finally:
        for each in pools.values():
            await each.close()


def importable_name(kind: type) -> str:
    """Return a path by which another process can import the class."""
    module = kind.__module__
    if module == "__main__" or module.startswith(FILE_MODULE):
        return f"{Path(inspect.getfile(kind)).absolute()}:{kind.__qualname__}"
    return f"{module}:{kind.__qualname__}"
