"""A role: what a worker process does, and how the worker that does it is made. Several may share a process."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Rank:
    """Which worker of how many."""

    index: int
    size: int


@dataclass(frozen=True, slots=True)
class Role:
    """On each rank a worker is built as `worker_cls(rank=Rank(i, size), **init)`. A constructor that asks for `roles`
    gets the workers by role that live in its process, itself and those to come included once they are built."""

    worker_cls: type
    init: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.worker_cls, type):
            raise TypeError(f"{self.worker_cls!r} is not a class")

    def make(self, rank: Rank, roles: Mapping[str, Any]) -> Any:
        """The worker of `rank`, beside those of `roles`."""
        asks = "roles" in inspect.signature(self.worker_cls).parameters and "roles" not in self.init
        return self.worker_cls(rank=rank, **self.init, **({"roles": roles} if asks else {}))


def make_all(roles: Mapping[str, Role], rank: Rank) -> dict[str, Any]:
    """The workers of one process by role, built in order."""
    workers: dict[str, Any] = {}
    for name, role in roles.items():
        workers[name] = role.make(rank, workers)
    return workers
