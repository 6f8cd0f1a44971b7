"""Calls on all workers of a role at once, over whatever backend carries them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Self

from penstock.groups.backend import Backend, Call
from penstock.groups.errors import CallRefused
from penstock.groups.future import CallFuture, Prepared, Sent
from penstock.groups.intent import Intent
from penstock.groups.mesh import Mesh, Parts, every_rank, only
from penstock.groups.method import RemoteMethod, Split, remote_method, remote_methods
from penstock.groups.modes import Execute


class Group:
    """The marked methods of the role's class are methods of the group."""

    def __init__(self, backend: Backend, role: str) -> None:
        self.backend, self.role = backend, role
        self._methods = remote_methods(backend.roles[role].worker_cls)
        worker_cls = backend.roles[role].worker_cls
        if hidden := self._methods.keys() & set(dir(self)):
            raise TypeError(f"{worker_cls.__name__}.{min(hidden)} cannot be a remote method: a group has its own")
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
        return partial(self._call, method)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Workers."""
        return self.backend.size

    def on(self, rank: int) -> OneWorker:
        """The worker of that rank, for its direct methods."""
        if not 0 <= rank < self.size:
            raise CallRefused(f"{self.role} has ranks 0 to {self.size - 1}, not {rank}")
        return OneWorker(self, rank)

    def close(self) -> None:
        """End the workers, those of the other roles in their processes included."""
        self.backend.close()

    def _call(self, method: RemoteMethod, /, *arguments: Any, **keywords: Any) -> Any:
        if method.is_direct:
            raise CallRefused(
                f"{method.name} is a direct rollout method, which one worker carries out: call it as "
                f"group.on(rank).{method.name}(...), with a rank from 0 to {self.size - 1}"
            )
        return self._call_over(lambda: self._parts(method), method, method.bind(arguments, keywords))

    def _call_over(self, parts: Callable[[], Parts], method: RemoteMethod, given: Mapping[str, Any]) -> Any:
        """What takes no futures is refused here; else it is for the future to tell."""

        def prepare(arguments: Mapping[str, Any]) -> Prepared:
            chosen = parts()
            return Prepared(method.split(arguments, len(chosen)), chosen)

        future, send = CallFuture(self.role, method), partial(self._send, method)
        futures = [value for value in map(_unwrapped, given.values()) if isinstance(value, CallFuture)]
        if futures:
            waits = not all(taken.done() for taken in futures)
            self.backend.order.run(lambda: future.begin(lambda: prepare(_resolved(given)), send), waits=waits)
        else:
            prepared = prepare(given)
            if self.backend.order.run(lambda: future.begin(lambda: prepared, send), waits=False):
                future.raise_if_refused()
        return future.result() if method.blocking else future

    def _send(self, method: RemoteMethod, prepared: Prepared) -> Sent:
        split, parts = prepared.split, prepared.parts
        calls = {
            rank: Call(self.role, method.name, split.arguments[part], wanted=rank in parts.collectors)
            for rank, part in parts.of_rank.items()
        }
        return Sent(self.backend.start(calls), parts.collectors, split.padding, time.monotonic())

    def _parts(self, method: RemoteMethod) -> Parts:
        if method.execute is Execute.RANK_ZERO:
            return only(0)
        return every_rank(self.size) if method.over == "ranks" else self._mesh.parts(method.over)

    @cached_property
    def _mesh(self) -> Mesh:
        """Asked for once, when it is first needed."""
        asking, nothing = CallFuture(self.role, MESH_RANK), Split([{}] * self.size, None)
        asking.begin(lambda: Prepared(nothing, every_rank(self.size)), partial(self._send, MESH_RANK))
        return Mesh(self.role, asking.result())


class OneWorker:
    """One worker of a group, and its direct methods."""

    def __init__(self, group: Group, rank: int) -> None:
        self._group, self._rank = group, rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = self._group._methods.get(name)
        if method is None or not method.is_direct:
            raise AttributeError(f"{name!r} is not a direct rollout method of {self._group.role}")
        return partial(self._call, method)

    def _call(self, method: RemoteMethod, /, *arguments: Any, **keywords: Any) -> Any:
        return self._group._call_over(lambda: only(self._rank), method, method.bind(arguments, keywords))


def mesh_rank(worker: Any) -> None:
    """Where the worker stands; its class has it."""


MESH_RANK: RemoteMethod = remote_method()(mesh_rank).__remote_method__  # type: ignore[attr-defined]


def _unwrapped(value: Any) -> Any:
    return value.value if isinstance(value, Intent) else value


def _resolved(given: Mapping[str, Any]) -> dict[str, Any]:
    """With results in place of futures."""
    return {name: _result_of(value) for name, value in given.items()}


def _result_of(value: Any) -> Any:
    if isinstance(value, Intent):
        return replace(value, value=_result_of(value.value))
    return value.result() if isinstance(value, CallFuture) else value
