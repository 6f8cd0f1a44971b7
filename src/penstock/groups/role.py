"""A role: the class of a worker and its constructor arguments. Workers of several roles may share a process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Rank:
    """The index of a worker and the number of workers."""

    index: int
    size: int


@dataclass(frozen=True, slots=True)
class Role:
    """A role of worker. Each rank builds one as `worker_cls(rank=Rank(i, size), **init)`.

    A constructor with a parameter `roles` gets the dictionary of the workers in its process, by role. The worker itself
    and later workers are added to it once they are built."""

    worker_cls: type
    init: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.worker_cls, type):
            raise TypeError(f"{self.worker_cls!r} is not a class")


def make_all(roles: Mapping[str, Role], rank: Rank) -> dict[str, Any]:
    """Build the workers of one process in order, and return them by role."""
    workers: dict[str, Any] = {}
    for name, role in roles.items():
        init = dict(role.init)
        if "roles" in inspect.signature(role.worker_cls).parameters:
            init.setdefault("roles", workers)
        workers[name] = role.worker_cls(rank=rank, **init)
    return workers
