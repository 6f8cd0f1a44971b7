"""The one-process backend: workers are plain objects, called one after another by whoever calls the group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.groups.backend import Backend, Call, Handle, Raised, carry_out, settle
from penstock.groups.group import Group
from penstock.groups.role import Rank, Role, make_all


class LocalBackend(Backend):
    """Arguments and results are handed over as they are, not copied. What a constructor raises comes as it is."""

    def __init__(self, roles: Mapping[str, Role], size: int = 1) -> None:
        super().__init__(roles, size)
        self.workers = [make_all(self.roles, Rank(i, size)) for i in range(size)]
        """By rank, then by role."""

    def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
        return {rank: self._run(self.workers[rank], call) for rank, call in calls.items()}

    def _run(self, workers: Mapping[str, Any], call: Call) -> Handle:
        handle: Handle = Handle()
        try:
            settle(handle, carry_out(workers, call))
        except Raised as error:
            settle(handle, error=error)
        return handle

    def close(self) -> None:
        self.workers = []


class LocalGroup(Group):
    """A group of one role, in this process."""

    def __init__(self, worker_cls: type, size: int = 1, **init: Any) -> None:
        """Each worker is built as `worker_cls(rank=Rank(i, size), **init)`."""
        role = Role(worker_cls, init)
        self._local = LocalBackend({worker_cls.__name__: role}, size)
        super().__init__(self._local, worker_cls.__name__)

    @property
    def workers(self) -> list[Any]:
        """By rank."""
        return [workers[self.role] for workers in self._local.workers]
