"""Where a run keeps its things: the run directory that stays, the runtime directory that goes.

A run belongs to one supervisor, which holds a lock on the run directory itself. The system drops the lock with the
process, so no stale lock can exist.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.config import Config
from penstock.supervisor.record import Record

SHARED_MEMORY = Path("/dev/shm")


class RunExists(RuntimeError):
    """The run id is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A new run, owned by this process."""

    run_id: str
    run_dir: Path
    runtime_dir: Path
    config: Config
    record: Record


def new_run_id() -> str:
    """The date and time, and enough chance to tell two runs of one second apart."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def runtime_path(run_id: str) -> Path:
    """Sockets, ready files and shared-memory weights of a run; in memory where the system offers that."""
    base = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"penstock-{os.getuid()}-{run_id}"


def existing_parent(directory: Path) -> Path:
    """Where `directory` is or would be made."""
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.is_dir())


def publishable(config: Config) -> dict[str, Any]:
    """The configuration as plain values, without its secrets."""
    return config.model_dump(mode="json", exclude={"rollout": {"api_key", "admin_api_key"}})


@contextmanager
def open_run(config: Config) -> Iterator[OpenRun]:
    """Create the directory of a new run and hold its lock. Raises `RunExists`."""
    run_id = config.run_id or new_run_id()
    config = config.model_copy(update={"run_id": run_id})
    run_dir = Path(config.runs_dir).absolute() / run_id
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    lock = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunExists(f"run {run_id} is already being supervised") from None
        if (run_dir / "state.json").exists():
            raise RunExists(f"run {run_id} exists already in {run_dir}")
        (run_dir / "config.yaml").write_text(yaml.safe_dump(publishable(config), sort_keys=False))
        runtime_dir = runtime_path(run_id)
        record = Record.create(run_dir, run_id=run_id, runtime_dir=runtime_dir)
        yield OpenRun(run_id=run_id, run_dir=run_dir, runtime_dir=runtime_dir, config=config, record=record)
    finally:
        os.close(lock)
