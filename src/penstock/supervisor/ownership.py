"""Who owns a run: whoever holds the lock in its directory (standard library only; the janitor too).

The system drops the lock with the process that holds it, so no stale one can exist. It holds between the containers of
a machine, and between machines where their shared file system carries locks, as NFS does for files, not directories.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"
BETWEEN_TRIES_S = 0.05


class Owned(RuntimeError):
    """Somebody else owns the run."""


@contextmanager
def owning(run_dir: Path, *, within_s: float = 0.0) -> Iterator[None]:
    """Own the run for the length of the body. Raises `Owned` if somebody else still does after `within_s`."""
    lock = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    limit = time.monotonic() + within_s
    try:
        while not _take(lock):
            if time.monotonic() >= limit:
                raise Owned(f"run {run_dir.name} is already being supervised")
            time.sleep(BETWEEN_TRIES_S)
        yield
    finally:
        os.close(lock)


def is_owned(run_dir: Path) -> bool:
    """Whether somebody, wherever he is, owns the run right now."""
    try:
        lock = os.open(run_dir / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _take(lock)
    finally:
        os.close(lock)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
