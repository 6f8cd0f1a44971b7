"""The runtime directory and the processes of a run: the marks of their owner, and the removal of orphans (standard
library only).

Every process of a run carries a mark in its environment. The run's runtime directory holds the same mark in a file. The
mark names the run and the `Identity` of its supervisor. While this supervisor lives, no other process removes them.
When it is gone, they are orphans: nothing else will end them, so `stop`, `resume` and `doctor --clean` remove them.
"""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from penstock.own_files import Foreign, is_ours, read_document, remove_tree
from penstock.supervisor import procfs
from penstock.supervisor.ownership import Owned, hold, is_locked, owning
from penstock.supervisor.procfs import Identity
from penstock.supervisor.run_journal import close_journal, is_supervised, owner_of, read_state

SHARED_MEMORY = Path("/dev/shm")
OWNER = "PENSTOCK_OWNER"
OWNER_FILE = "owner.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The owner of a process or directory: one life of a run."""

    run_dir: str
    runtime_dir: str
    nonce: str
    supervisor: Identity

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str | bytes) -> Mark | None:
        """Return the mark in `text`; None if it is no mark."""
        try:
            fields = json.loads(text)
            supervisor = Identity.of(fields["supervisor"])
            mark = cls(**{**fields, "supervisor": supervisor}) if supervisor else None
            if mark and any(b"\0" in os.fsencode(each) for each in (mark.run_dir, mark.runtime_dir, mark.nonce)):
                return None
            return mark
        except (ValueError, TypeError, KeyError, RecursionError):
            return None


def runtime_path(run_id: str) -> Path:
    """Return a new path for the directory of sockets, ready files and shared-memory weights of a run; in memory where
    possible. Each call returns another path: every user may write there, so no user must know the name before the
    directory exists."""
    return base() / f"{_prefix(run_id)}.{secrets.token_hex(4)}"


def base() -> Path:
    """Return the directory in which runs make their runtime directories."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _prefix(run_id: str) -> str:
    return f"penstock-{os.geteuid()}-{run_id}"


def runtime_dirs(run_id: str = "") -> list[Path]:
    """Return this user's runtime directories on this machine, for run ids that begin with `run_id`."""
    bases = {SHARED_MEMORY, Path(tempfile.gettempdir())}
    found = (path for each in bases for path in each.glob(f"{_prefix(run_id)}*"))
    return sorted(path for path in found if is_ours(path) and not path.is_symlink() and path.is_dir())


def claim(runtime_dir: Path, *, run_dir: Path, nonce: str) -> dict[str, str]:
    """Make the runtime directory of a run that this process supervises. Return the mark for the environment of its
    processes. A system that cannot identify processes gets no marks, and then nothing is ever removed. Raises OSError
    if the directory exists already."""
    runtime_dir.mkdir(mode=0o700)
    supervisor = procfs.identify(os.getpid())
    if supervisor is None:
        return {}
    mark = Mark(run_dir=str(run_dir.absolute()), runtime_dir=str(runtime_dir), nonce=nonce, supervisor=supervisor)
    (runtime_dir / OWNER_FILE).write_text(mark.dumps())
    hold(runtime_dir / OWNER_FILE)
    return {OWNER: mark.dumps()}


def mark_of_directory(directory: Path) -> Mark | None:
    """Return the mark of a runtime directory; None if it has none, or if the directory or the mark is not ours."""
    try:
        return Mark.loads(read_document(directory / OWNER_FILE, ours=True)) if is_ours(directory) else None
    except OSError:
        return None


def mark_of_process(pid: int) -> Mark | None:
    """Return the mark of a process; None if it has none, is gone, or belongs to another user."""
    prefix = f"{OWNER}=".encode()
    for entry in procfs.environment(pid):
        if entry.startswith(prefix):
            return Mark.loads(entry.removeprefix(prefix))
    return None


@dataclass(slots=True, kw_only=True)
class Orphans:
    """Processes and directories with the mark of one supervisor that is gone."""

    mark: Mark
    processes: list[procfs.Stat] = field(default_factory=list)
    directories: list[Path] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Found:
    """Everything with a mark on this machine that this user may see."""

    orphans: list[Orphans] = field(default_factory=list)
    living: set[int]
    """Pids of living supervisors. A supervisor may itself carry the mark of a dead run, in which it was started."""
    unmarked: list[Path]
    """Runtime directories without a mark."""
    foreign: list[Orphans] = field(default_factory=list)
    """Orphans of ours with a mark that names the run directory of another user."""


def find_orphans() -> Found:
    """Search all processes and runtime directories of this user."""
    marked: dict[Mark, Orphans] = {}
    unmarked: list[Path] = []
    for stat in procfs.table():
        if not stat.is_dead and (mark := mark_of_process(stat.pid)):
            marked.setdefault(mark, Orphans(mark=mark)).processes.append(stat)
    for directory in runtime_dirs():
        if mark := mark_of_directory(directory):
            marked.setdefault(mark, Orphans(mark=mark)).directories.append(directory)
        else:
            unmarked.append(directory)
    alive = {mark for mark in marked if _is_in_use(mark)}
    found = Found(unmarked=unmarked, living={mark.supervisor.pid for mark in alive if mark.supervisor.is_here})
    for mark, orphans in marked.items():
        orphans.processes = [stat for stat in orphans.processes if stat.pid not in found.living]
        if mark not in alive and (orphans.processes or orphans.directories):
            run_dir = Path(mark.run_dir)
            is_foreign = os.path.lexists(run_dir) and not is_ours(run_dir)
            (found.foreign if is_foreign else found.orphans).append(orphans)
    return found


def _is_in_use(mark: Mark) -> bool:
    """Return whether the supervisor of this mark lives. The run directory of a container may be another one here, but a
    runtime directory that both see has one lock."""
    is_held = is_locked(Path(mark.runtime_dir) / OWNER_FILE)
    return is_held or is_supervised(Path(mark.run_dir), mark.supervisor)


def remove_orphans(orphans: Orphans, *, living: Collection[int]) -> list[str]:
    """Kill these processes and their descendants, remove these directories, and close the run's journal. Spare the pids
    in `living`. Returns what could not be removed."""
    mark = orphans.mark
    remaining = procfs.kill_family(lambda stat: mark_of_process(stat.pid) == mark, spare=living)
    left = [f"process {stat.pid}" for stat in remaining]
    for directory in orphans.directories:
        if mark_of_directory(directory) == mark:
            left += [] if remove_tree(directory) else [str(directory)]
    close_abandoned(Path(mark.run_dir), mark.supervisor, left)
    return left


def remove_orphans_of(run_dir: Path) -> list[str]:
    """Remove everything that earlier lives of this run left behind. Returns what could not be removed."""
    found, own = find_orphans(), run_dir.resolve()
    mine = [each for each in found.orphans if Path(each.mark.run_dir).resolve() == own]
    return [left for each in mine for left in remove_orphans(each, living=found.living)]


def close_abandoned(run_dir: Path, supervisor: Identity, leftovers: list[str]) -> None:
    """Mark the run failed that `supervisor` left open. Do nothing if its directory is gone or not ours, or if the run
    has another owner by now."""
    with suppress(Owned, Foreign, FileNotFoundError), owning(run_dir) as directory:
        if owner_of(read_state(directory) or {}) == supervisor:
            close_journal(directory, leftovers)
