"""Unprivileged users for the boxes of root. Two boxes never have the same user at the same time."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

FIRST_UID = 60_706
NUM_SLOTS = 4_000
"""All are below 65,536, because many containers have no user ids above that. systemd uses none of the first 478. It may
give the others to services with `DynamicUser`."""


class UserSlot:
    """One user, held by a lock on a file that only root can open. The lock ends with this process."""

    def __init__(self) -> None:
        directory = _directory()
        for uid in range(FIRST_UID, FIRST_UID + NUM_SLOTS):
            self._fd = os.open(directory / str(uid), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                continue
            self.uid = uid
            return
        raise OSError(f"all {NUM_SLOTS} users for sandboxes are taken (locks in {directory})")

    def close(self) -> None:
        os.close(self._fd)


def _directory() -> Path:
    """Return the directory of the locks. Raises OSError if another user prepared it."""
    base = Path("/run") if os.access("/run", os.W_OK) else Path("/tmp")
    directory = base / "penstock-sandbox"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o077:
        raise OSError(f"{directory} is not a private directory of root: remove it")
    return directory
