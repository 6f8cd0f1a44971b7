"""The ownership of a run: the process that holds the lock in its directory owns it (standard library only, because the
janitor uses this module).

The system drops the lock when its holder ends, so a stale lock cannot exist. The lock works between the containers of a
machine. It also works between machines if their shared file system supports locks. NFS supports locks on files, but
not on directories.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.own_files import open_lock, own_directory

LOCK = ".lock"
BETWEEN_TRIES_S = 0.05


class Owned(RuntimeError):
    """Another process owns the run."""

    self_explanatory = True


@contextmanager
def owning(run_dir: Path, *, within_s: float = 0.0) -> Iterator[Path]:
    """Own the run during the body. Yield a path of its directory that another user cannot turn elsewhere. Raises
    `Owned` if another process still owns it after `within_s` seconds, and `Foreign` if the directory is not ours."""
    limit = time.monotonic() + within_s
    with own_directory(run_dir) as directory, _locking(directory / LOCK, create=True) as lock:
        while not _take(lock):
            if time.monotonic() >= limit:
                raise Owned(f"run {run_dir.name} is already being supervised: `penstock stop {run_dir.name}` ends it")
            time.sleep(BETWEEN_TRIES_S)
        yield directory


def is_owned(run_dir: Path) -> bool:
    """Return whether a process, on this or another machine, owns the run now."""
    return is_locked(run_dir / LOCK)


def is_locked(file: Path) -> bool:
    """Return whether a process, on this or another machine, holds the lock of `file`."""
    try:
        with _locking(file, create=False) as lock:
            return not _take(lock)
    except OSError:
        return False


def hold(file: Path) -> None:
    """Lock a file of ours until this process ends."""
    lock = open_lock(file, create=True)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def _locking(file: Path, *, create: bool) -> Iterator[int]:
    lock = open_lock(file, create=create)
    try:
        yield lock
    finally:
        os.close(lock)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
