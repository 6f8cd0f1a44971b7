"""Calls on all workers of a role at once, over any backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self

from penstock.groups.backend import Backend, Call
from penstock.groups.errors import CallRefused
from penstock.groups.future import CallFuture, Prepared
from penstock.groups.intent import Intent
from penstock.groups.mesh import Over, Parts, every_rank, mesh_parts, only
from penstock.groups.method import RemoteMethod, remote_method, remote_methods
from penstock.groups.modes import Execute


class Group:
    """All workers of a role. The remote methods of the role's class are methods of the group."""

    def __init__(self, backend: Backend, role: str) -> None:
        self.backend, self.role = backend, role
        worker_cls = backend.roles[role].worker_cls
        self._methods = remote_methods(worker_cls)
        if hidden := self._methods.keys() & set(dir(self)):
            name = f"{worker_cls.__name__}.{min(hidden)}"
            raise TypeError(f"{name} cannot be a remote method, because a group has this attribute: rename it")
        for name, method in self._methods.items():
            if method.over != "ranks" and not hasattr(worker_cls, "mesh_rank"):
                raise TypeError(
                    f"{worker_cls.__name__}.{name} is called over {method.over}: {worker_cls.__name__} needs a method "
                    "mesh_rank() that returns its MeshRank"
                )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = self.__dict__.get("_methods", {}).get(name)
        if method is None:
            raise AttributeError(f"{name!r} is not a remote method of {self.__dict__.get('role', 'this group')}")
        return partial(self._call, method, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Return the number of workers."""
        return self.backend.size

    def on(self, rank: int) -> OneWorker:
        """Return the worker of a rank, for its direct methods. Raises `CallRefused` if there is no such rank."""
        if not 0 <= rank < self.size:
            raise CallRefused(f"{self.role} has ranks 0 to {self.size - 1}, not {rank}")
        return OneWorker(self, rank)

    def close(self) -> None:
        """End the workers, including workers of other roles in the same processes."""
        self.backend.close()

    def _call(self, method: RemoteMethod, rank: int | None, /, *arguments: Any, **keywords: Any) -> Any:
        """Make a call, on one `rank` for a direct method. Without futures among its arguments, a refused call raises
        here; with futures, its own future raises the error."""
        if method.is_direct and rank is None:
            raise CallRefused(
                f"{method.name} is a direct rollout method, which one worker carries out: call it as "
                f"group.on(rank).{method.name}(...), with a rank from 0 to {self.size - 1}"
            )
        given = method.bind(arguments, keywords)

        def prepare() -> Prepared:
            parts = self._parts(method) if rank is None else only(rank)
            return self._prepared(method, parts, {name: _result_of(value) for name, value in given.items()})

        future = CallFuture(self.role, method)
        values = [value.value if isinstance(value, Intent) else value for value in given.values()]
        futures = [value for value in values if isinstance(value, CallFuture)]
        if futures:
            waits = not all(each.done() for each in futures)
            self.backend.queue.run(lambda: future.begin(prepare, self.backend), waits=waits)
        else:
            prepared = prepare()
            if self.backend.queue.run(lambda: future.begin(lambda: prepared, self.backend), waits=False):
                future.raise_if_refused()
        return future.result() if method.blocking else future

    def _prepared(self, method: RemoteMethod, parts: Parts, given: Mapping[str, Any]) -> Prepared:
        arguments, padding = method.split(given, len(parts.collectors))
        calls = {
            rank: Call(self.role, method.name, arguments[part], wanted=rank in parts.collectors)
            for rank, part in parts.of_rank.items()
        }
        return Prepared(calls, parts.collectors, padding)

    def _parts(self, method: RemoteMethod) -> Parts:
        if method.execute is Execute.RANK_ZERO:
            return only(0)
        return every_rank(self.size) if method.over == "ranks" else self._mesh[method.over]

    @cached_property
    def _mesh(self) -> dict[Over, Parts]:
        """Return the parts over each dimension of the mesh. The workers are asked once, when a call first needs it."""
        future = CallFuture(self.role, MESH_RANK)
        future.begin(lambda: self._prepared(MESH_RANK, every_rank(self.size), {}), self.backend)
        return mesh_parts(self.role, future.result())


class OneWorker:
    """One worker of a group, and its direct methods."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank = group, rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = self._group._methods.get(name)
        if method is None or not method.is_direct:
            raise AttributeError(f"{name!r} is not a direct rollout method of {self._group.role}")
        return partial(self._group._call, method, self._rank)


def mesh_rank(worker: Any) -> None:
    """Stand for the method `mesh_rank` that the worker's class defines."""


MESH_RANK: RemoteMethod = remote_method()(mesh_rank).__remote_method__  # type: ignore[attr-defined]


def _result_of(value: Any) -> Any:
    """Return an argument with the result in place of a future."""
    if isinstance(value, Intent):
        return replace(value, value=_result_of(value.value))
    return value.result() if isinstance(value, CallFuture) else value
