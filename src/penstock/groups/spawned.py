"""The backend of spawned processes: the workers of each rank live in a child process, and calls go through its pipe.

Children end with the driver, even if the driver is killed. When a child ends, its calls fail, and it is not replaced.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from penstock.groups.group import Group
from penstock.groups.rank_worker import RankWorker
from penstock.groups.remote import START_S, RemoteBackend
from penstock.groups.role import Role
from penstock.runtime import frames
from penstock.runtime.child_process import ChildProcess
from penstock.runtime.frames import Frames

ANSWERER = f"{RankWorker.__module__}:{RankWorker.__name__}"


class SpawnedBackend(RemoteBackend):
    """Workers in child processes, one process for each rank."""

    def __init__(self, roles: Mapping[str, Role], size: int = 1) -> None:
        """Raises TypeError for classes of the script that runs, since children cannot import it."""
        for name, role in roles.items():
            if role.worker_cls.__module__ == "__main__":
                raise TypeError(
                    f"{name}: {role.worker_cls.__name__} is defined in the script that runs, which its processes "
                    "cannot import: move it into a module"
                )
        children: list[ChildProcess] = []
        try:
            for _ in range(size):
                children.append(ChildProcess(ANSWERER))
            super().__init__(roles, [ChildConnection(child) for child in children], start_s=START_S)
        except BaseException:
            for child in children:
                child.kill()
            raise
        self.pids = [child.pid for child in children]
        """Process ids by rank."""


class ChildConnection:
    """The connection to a rank's child process."""

    def __init__(self, child: ChildProcess) -> None:
        self._child = child
        self._malformed = ""
        """Description of a malformed message of the child, for which it was killed."""

    def send(self, message: Frames) -> None:
        frames.send(self._child.pipe, message)

    def receive(self) -> Frames:
        try:
            return frames.receive(self._child.pipe)
        except frames.MalformedMessage as error:
            self._malformed = f"it was killed: {error}"
            self._child.kill()
            raise

    def leave(self) -> None:
        with suppress(OSError):
            self._child.pipe.shutdown(socket.SHUT_RDWR)

    def ended(self) -> str:
        try:
            end = self._child.wait()
            return self._malformed or end
        finally:
            self._child.pipe.close()


class SpawnedGroup(Group):
    """A group of one role. Each worker has a process of its own."""

    def __init__(self, worker_cls: type, size: int = 1, **init: Any) -> None:
        """Each worker is built as `worker_cls(rank=Rank(i, size), **init)`."""
        roles = {worker_cls.__name__: Role(worker_cls, init)}
        super().__init__(SpawnedBackend(roles, size), worker_cls.__name__)
