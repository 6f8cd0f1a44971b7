"""Who owns a run: whoever holds the lock on its directory (standard library only; the janitor too).

The system drops the lock with the process that holds it, so no stale one can exist.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BETWEEN_TRIES_S = 0.05


class Owned(RuntimeError):
    """Somebody else owns the run."""


@contextmanager
def owning(run_dir: Path, *, within_s: float = 0.0) -> Iterator[None]:
    """Own the run for the length of the body. Raises `Owned` if somebody else still does after `within_s`."""
    lock = os.open(run_dir, os.O_RDONLY)
    limit = time.monotonic() + within_s
    try:
        while not _take(lock):
            if time.monotonic() >= limit:
                raise Owned(f"run {run_dir.name} is already being supervised")
            time.sleep(BETWEEN_TRIES_S)
        yield
    finally:
        os.close(lock)


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
