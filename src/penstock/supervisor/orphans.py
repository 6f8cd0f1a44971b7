"""What dead runs left behind, and how to remove exactly that (standard library only): all that carries the mark of a
supervisor that is gone has nobody left to end it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.supervisor import janitor, procfs, runtime
from penstock.supervisor.ownership import Owned, owning
from penstock.supervisor.procfs import Identity
from penstock.supervisor.record import is_supervised, owner_of, read_state
from penstock.supervisor.runtime import Mark, mark_of_directory, mark_of_process


@dataclass(slots=True, kw_only=True)
class Orphans:
    """What carries the mark of a supervisor that is gone."""

    mark: Mark
    processes: list[procfs.Stat] = field(default_factory=list)
    directories: list[Path] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Found:
    """All that carries marks on this machine, as far as it is ours to see."""

    orphans: list[Orphans]
    living: set[int]
    """Pids of supervisors that live. One may itself carry the mark of a dead run, within which it was started."""
    unmarked: list[Path]
    """Runtime directories that do not say whose they are."""


def find() -> Found:
    """Look at all processes and runtime directories of this user."""
    marked: dict[Mark, Orphans] = {}
    unmarked: list[Path] = []
    for stat in procfs.table():
        if stat.state not in "ZX" and (mark := mark_of_process(stat.pid)):
            marked.setdefault(mark, Orphans(mark=mark)).processes.append(stat)
    for directory in runtime.runtime_dirs():
        if mark := mark_of_directory(directory):
            marked.setdefault(mark, Orphans(mark=mark)).directories.append(directory)
        else:
            unmarked.append(directory)
    alive = {mark for mark in marked if is_supervised(Path(mark.run_dir), mark.supervisor)}
    living = {mark.supervisor.pid for mark in alive if mark.supervisor.is_here}
    orphans = [each for mark, each in marked.items() if mark not in alive]
    for each in orphans:
        each.processes = [stat for stat in each.processes if stat.pid not in living]
    return Found(
        orphans=[each for each in orphans if each.processes or each.directories], living=living, unmarked=unmarked
    )


def remove(orphans: Orphans, *, living: Collection[int]) -> list[str]:
    """End those processes and what they started, remove those directories, and close the record of that life of the
    run. Returns what resisted."""
    mark = orphans.mark
    remaining = procfs.kill_family(
        lambda stat: mark_of_process(stat.pid) == mark, spare={os.getpid(), *living}, rounds=janitor.ROUNDS
    )
    for directory in orphans.directories:
        if mark_of_directory(directory) == mark:
            shutil.rmtree(directory, ignore_errors=True)
    left = [f"process {stat.pid}" for stat in remaining]
    left += [str(directory) for directory in orphans.directories if mark_of_directory(directory) == mark]
    close_record(Path(mark.run_dir), mark.supervisor, left)
    return left


def remove_of_run(run_dir: Path) -> list[str]:
    """All that earlier lives of this run left behind. Returns what resisted."""
    found, own = find(), run_dir.resolve()
    mine = [each for each in found.orphans if Path(each.mark.run_dir).resolve() == own]
    return [left for each in mine for left in remove(each, living=found.living)]


def close_record(run_dir: Path, supervisor: Identity, leftovers: list[str]) -> None:
    """Mark a run failed that `supervisor` left open, unless it is gone, or somebody else's meanwhile."""
    with suppress(Owned, FileNotFoundError), owning(run_dir):
        if owner_of(read_state(run_dir) or {}) == supervisor:
            janitor.close_record(run_dir, leftovers)
