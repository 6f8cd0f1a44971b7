"""Limits on the memory and the processes of a whole box, where this user may make control groups (versions 1 and 2)."""

from __future__ import annotations

import itertools
import os
import time
from contextlib import suppress
from pathlib import Path

from penstock.sandbox.limits import DEFAULT_LIMITS, Limits

ROOT = Path("/sys/fs/cgroup")
PREFIX = "penstock-box-"
OWN_BYTES = 64 << 20
"""Memory of the launcher, the init and the kernel's structures."""
OWN_PROCESSES = 4
EMPTY_S = 2.0
"""Wait for the last process of a box to leave its groups."""
_numbers = itertools.count()


class ControlGroups:
    """The groups of one box: one with version 2, one per controller with version 1, none where nothing is writable."""

    def __init__(self, limits: Limits) -> None:
        self.folders: list[Path] = []
        name = f"{PREFIX}{os.getpid()}-{start_ticks(os.getpid())}-{next(_numbers)}"
        for parent, settings in _parents(limits):
            remove_abandoned(parent)
            with suppress(OSError):
                self._make(parent / name, settings)

    def _make(self, folder: Path, settings: dict[str, int]) -> None:
        folder.mkdir()
        try:
            for file, value in settings.items():
                (folder / file).write_text(str(value))
        except OSError:
            folder.rmdir()
            raise
        self.folders.append(folder)

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
        limit = time.monotonic() + EMPTY_S
        for folder in self.folders:
            while not _removed(folder) and time.monotonic() < limit:
                time.sleep(0.001)


def sweep() -> None:
    """Remove the groups of processes that were killed, beside which this process could make its own."""
    for parent, _ in _parents(DEFAULT_LIMITS):
        remove_abandoned(parent)


def remove_abandoned(parent: Path) -> None:
    """Remove the groups of processes that were killed."""
    for folder in parent.glob(f"{PREFIX}*"):
        pid, born, _ = folder.name.removeprefix(PREFIX).split("-")
        if start_ticks(int(pid)) != born:
            _removed(folder)


def _removed(folder: Path) -> bool:
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
            found.append((ROOT / "memory" / own, {"memory.limit_in_bytes": memory}))
        elif controllers == "pids":
            found.append((ROOT / "pids" / own, {"pids.max": processes}))
    return [(parent, settings) for parent, settings in found if os.access(parent, os.W_OK)]


def _family(pid: int) -> list[int]:
    family = [pid]
    for each in family:
        for tasks in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                family += map(int, tasks.read_text().split())
    return family


def start_ticks(pid: int) -> str:
    """Return when a process started, in clock ticks since the boot; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
