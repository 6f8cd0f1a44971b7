"""The backend within one process: workers are plain objects. The thread that calls the group runs them in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.groups.backend import Backend, Call, Handle
from penstock.groups.errors import Raised
from penstock.groups.group import Group
from penstock.groups.role import Rank, Role, make_all


class LocalBackend(Backend):
    """Workers in this process. Arguments and results are not copied. An exception of a constructor is raised as it
    is."""

    def __init__(self, roles: Mapping[str, Role], size: int = 1) -> None:
        super().__init__(roles, size)
        self.workers = [make_all(self.roles, Rank(i, size)) for i in range(size)]
        """Workers by rank, then by role."""

    def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
        handles = {}
        for rank, call in calls.items():
            handles[rank] = Handle(rank, call.role, call.method)
            try:
                handles[rank].settle(call.carry_out(self.workers[rank]))
            except Exception as error:
                handles[rank].settle(Raised.of(error))
        return handles

    def close(self) -> None:
        self.workers = []


class LocalGroup(Group):
    """A group of one role, in this process."""

    def __init__(self, worker_cls: type, size: int = 1, **init: Any) -> None:
        """Each worker is built as `worker_cls(rank=Rank(i, size), **init)`."""
        self._local = LocalBackend({worker_cls.__name__: Role(worker_cls, init)}, size)
        super().__init__(self._local, worker_cls.__name__)

    @property
    def workers(self) -> list[Any]:
        """Return the workers by rank."""
        return [workers[self.role] for workers in self._local.workers]
