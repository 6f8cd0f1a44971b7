"""What a run has outside its run directory, and whose it is (standard library only).

Every process of a run carries a mark in its environment, and the run's runtime directory the same in a file: whose they
are, the supervisor being known by its `Identity`. While that very process lives, nobody else touches them.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.supervisor import procfs
from penstock.supervisor.procfs import Identity
from penstock.supervisor.record import is_supervised

SHARED_MEMORY = Path("/dev/shm")
OWNER = "PENSTOCK_OWNER"
OWNER_FILE = "owner.json"


class RuntimeTaken(OSError):
    """The runtime directory of a run is there already."""


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
            supervisor = Identity.of(fields["supervisor"])
            return cls(**{**fields, "supervisor": supervisor}) if supervisor else None
        except (ValueError, TypeError, KeyError):
            return None


def runtime_path(run_id: str) -> Path:
    """Sockets, ready files and shared-memory weights of a run; in memory where the system offers that."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"penstock-{os.getuid()}-{run_id}"


def runtime_dirs(run_id: str = "") -> list[Path]:
    """Those that there are, of this user, on this machine; of runs whose ids begin so."""
    bases = {SHARED_MEMORY, Path(tempfile.gettempdir())}
    found = (path for base in bases for path in base.glob(f"{runtime_path(run_id).name}*") if path.is_dir())
    return sorted(path for path in found if path.stat().st_uid == os.getuid())


def claim(runtime_dir: Path, *, run_dir: Path, nonce: str) -> dict[str, str]:
    """Make the runtime directory of a run that this process supervises; returns the mark for the environment of its
    processes. Where the system cannot tell one process from another there are no marks, and nothing is ever removed.
    Raises `RuntimeTaken`."""
    try:
        runtime_dir.mkdir(mode=0o700)
    except FileExistsError:
        raise RuntimeTaken(_why_taken(runtime_dir)) from None
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


def _why_taken(runtime_dir: Path) -> str:
    mark = mark_of_directory(runtime_dir)
    if mark is None:
        return f"{runtime_dir} exists already and does not say whose it is: choose another run_id, or remove it"
    if is_supervised(Path(mark.run_dir), mark.supervisor):
        return f"{runtime_dir} belongs to {mark.run_dir}, which is running: choose another run_id"
    return f"{runtime_dir} was left behind by {mark.run_dir}: `penstock doctor --clean` removes it"
