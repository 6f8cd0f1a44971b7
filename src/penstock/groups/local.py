"""The one-process backend: workers are plain objects called one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from penstock.groups.method import Rank, RemoteMethod, remote_methods

Worker = TypeVar("Worker")


class LocalGroup(Generic[Worker]):
    """`world_size` workers in this process; the marked methods of `worker_cls` are methods of the group."""

    def __init__(self, worker_cls: Callable[..., Worker], world_size: int = 1, **init: Any) -> None:
        """Each worker is built as `worker_cls(rank=Rank(i, world_size), **init)`."""
        if world_size < 1:
            raise ValueError(f"a group has at least one worker, not {world_size}")
        if not isinstance(worker_cls, type):
            raise TypeError(f"{worker_cls!r} is not a class")
        self._methods = remote_methods(worker_cls)
        self.workers: list[Worker] = [worker_cls(rank=Rank(i, world_size), **init) for i in range(world_size)]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = self.__dict__.get("_methods", {}).get(name)
        if method is None:
            raise AttributeError(f"{name!r} is not a remote method of this group")
        return lambda *arguments, **keywords: self._call(method, arguments, keywords)

    def _call(self, method: RemoteMethod, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        per_rank = method.split(arguments, keywords, len(self.workers))
        chosen = self.workers[:1] if method.execute == "rank_zero" else self.workers
        return method.collect(
            [getattr(worker, method.name)(**given) for worker, given in zip(chosen, per_rank, strict=False)]
        )
