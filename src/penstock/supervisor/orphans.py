"""What dead runs left behind, and how to remove exactly that (standard library only).

Every process of a run carries a mark in its environment, and the run's runtime directory the same in a file: whose they
are, the supervisor being known by pid, start time and boot id. While that very process lives, nothing of it is touched;
once it is gone, all that carries its mark has nobody left to end it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.supervisor import janitor, procfs
from penstock.supervisor.procfs import Identity, is_alive
from penstock.supervisor.record import owner_of, read_state
from penstock.supervisor.run_directory import SHARED_MEMORY, runtime_path

OWNER = "PENSTOCK_OWNER"
OWNER_FILE = "owner.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Whose something is: one life of a run."""

    run_dir: str
    runtime_dir: str
    nonce: str
    supervisor: Identity

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Mark | None:
        """None if it is no mark."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "supervisor": Identity(**fields["supervisor"])})
        except (ValueError, TypeError, KeyError):
            return None


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


def claim(runtime_dir: Path, *, run_dir: Path, nonce: str) -> dict[str, str]:
    """Make the runtime directory of a run that this process supervises; returns the mark for the environment of its
    processes. Where the system cannot tell one process from another there are no marks, and nothing is ever removed."""
    runtime_dir.mkdir(mode=0o700)
    supervisor = procfs.identify(os.getpid())
    if supervisor is None:
        return {}
    mark = Mark(run_dir=str(run_dir.absolute()), runtime_dir=str(runtime_dir), nonce=nonce, supervisor=supervisor)
    (runtime_dir / OWNER_FILE).write_text(mark.dumps())
    return {OWNER: mark.dumps()}


def mark_of_directory(directory: Path) -> Mark | None:
    """Whose a runtime directory is; None if it does not say."""
    try:
        return Mark.loads((directory / OWNER_FILE).read_text())
    except OSError:
        return None


def mark_of_process(pid: int) -> Mark | None:
    """Whose a process is; None if it is no run's, or gone, or not ours to read."""
    prefix = f"{OWNER}=".encode()
    for entry in procfs.environment(pid):
        if entry.startswith(prefix):
            return Mark.loads(entry.removeprefix(prefix))
    return None


def find() -> Found:
    """Look at all processes and runtime directories of this user."""
    marked: dict[Mark, Orphans] = {}
    unmarked: list[Path] = []
    for stat in procfs.table():
        if stat.state not in "ZX" and (mark := mark_of_process(stat.pid)):
            marked.setdefault(mark, Orphans(mark=mark)).processes.append(stat)
    for directory in _runtime_dirs():
        if mark := mark_of_directory(directory):
            marked.setdefault(mark, Orphans(mark=mark)).directories.append(directory)
        else:
            unmarked.append(directory)
    living = {mark.supervisor.pid for mark in marked if is_alive(mark.supervisor)}
    orphans = [each for mark, each in marked.items() if not is_alive(mark.supervisor)]
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


def close_record(run_dir: Path, supervisor: Identity, leftovers: list[str]) -> bool:
    """Mark a run failed that `supervisor` left open. False if it is somebody else's meanwhile, or has ended."""
    try:
        lock = os.open(run_dir, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        state = read_state(run_dir)
        if state is None or owner_of(state) != supervisor:
            return False
        return janitor.close_record(run_dir, leftovers)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def _runtime_dirs() -> list[Path]:
    bases = {SHARED_MEMORY, Path(tempfile.gettempdir())}
    return sorted(path for base in bases for path in base.glob(f"{runtime_path('').name}*") if path.is_dir())
