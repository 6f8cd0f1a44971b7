"""Limits on the memory and the processes of a whole box, where this user may make control groups (versions 1 and 2)."""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock.sandbox.limits import DEFAULT_LIMITS, Limits

ROOT = Path("/sys/fs/cgroup")
PREFIX = "penstock-box-"
OWN_BYTES = 64 << 20
"""Memory of the launcher, the init and the kernel's structures."""
OWN_PROCESSES = 4
TCP_BYTES = "memory.kmem.tcp.limit_in_bytes"
"""Version 1 counts the buffers of TCP apart."""
IF_KNOWN = {TCP_BYTES}
"""Settings that some kernels do not have."""
EMPTY_S = 2.0
"""Wait for the last process of a box to leave its groups."""
TRIES = 16
"""Another process may remove a group before it is locked, or have one of the same name in another pid namespace."""
_numbers = itertools.count()


class ControlGroups:
    """The groups of one box: one with version 2, one per controller with version 1, none where nothing is writable."""

    def __init__(self, limits: Limits) -> None:
        self._held: list[HeldGroup] = []
        for parent, settings in _parents(limits):
            remove_abandoned(parent)
            with suppress(OSError):
                self._make(parent, settings)

    @property
    def folders(self) -> list[Path]:
        return [group.folder for group in self._held]

    def _make(self, parent: Path, settings: dict[str, int]) -> None:
        group = HeldGroup.make(parent)
        try:
            for file, value in settings.items():
                if file not in IF_KNOWN or (group.folder / file).exists():
                    (group.folder / file).write_text(str(value))
        except OSError:
            group.remove()
            raise
        self._held.append(group)

    def add(self, launcher: int) -> None:
        """Move a launcher and its descendants into the groups, before a program starts. Each move takes the kernel
        some milliseconds, so it is best done also before the launcher has descendants."""
        for folder in self.folders:
            members = (folder / "cgroup.procs").read_text().split()
            for pid in _family(launcher):
                if str(pid) not in members:
                    with suppress(OSError):
                        (folder / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the groups. Their processes have ended, or are about to."""
        for group in self._held:
            group.remove()


@dataclass(frozen=True)
class HeldGroup:
    """One group. A lock on its directory says that its process lives, also to processes of other pid namespaces. The
    lock ends with the process."""

    folder: Path
    lock: int

    @classmethod
    def make(cls, parent: Path) -> Self:
        """Make a group that no other process removes. Raises OSError if this user may not."""
        for _ in range(TRIES):
            folder = parent / f"{PREFIX}{os.getpid()}-{next(_numbers)}"
            with suppress(FileExistsError):
                folder.mkdir()
                lock = _locked(folder)
                if lock is not None:
                    return cls(folder, lock)
                _is_removed(folder)
        raise OSError(f"no control group in {parent} in {TRIES} attempts")

    def remove(self) -> None:
        limit = time.monotonic() + EMPTY_S
        while not _is_removed(self.folder) and time.monotonic() < limit:
            time.sleep(0.001)
        os.close(self.lock)


def sweep() -> None:
    """Remove the groups of processes that were killed, beside which this process could make its own."""
    for parent, _ in _parents(DEFAULT_LIMITS):
        remove_abandoned(parent)


def remove_abandoned(parent: Path) -> None:
    """Remove the groups of processes that were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        lock = _locked(folder)
        if lock is not None:
            _is_removed(folder)
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """Return a descriptor that locks a group; None if another process has the lock or has removed the group."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(folder.stat(), os.fstat(descriptor)):
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _is_removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True


def _parents(limits: Limits) -> list[tuple[Path, dict[str, int]]]:
    """Return the groups of this process that may get children, and the settings of these children."""
    memory = limits.memory_bytes + 3 * limits.work_bytes + OWN_BYTES
    processes = limits.max_processes + OWN_PROCESSES
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own = path.lstrip("/")
        if not controllers and (ROOT / "cgroup.controllers").exists():
            found.append((ROOT / own, {"memory.max": memory, "pids.max": processes}))
        elif controllers == "memory":
            settings = {"memory.limit_in_bytes": memory, TCP_BYTES: limits.work_bytes}
            found.append((ROOT / "memory" / own, settings))
        elif controllers == "pids":
            found.append((ROOT / "pids" / own, {"pids.max": processes}))
    # A path that leads out of the hierarchy (`/../..`) belongs to another namespace of control groups.
    usable = [each for each in found if ".." not in each[0].parts and (each[0] / "cgroup.procs").exists()]
    return [(parent, settings) for parent, settings in usable if os.access(parent, os.W_OK)]


def _family(pid: int) -> list[int]:
    family = [pid]
    for each in family:
        for tasks in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                family += map(int, tasks.read_text().split())
    return family
