"""The logs of a run's processes: rotation by size, and quotes of their last lines for failure messages.

A process holds its log open for appending, so the file itself has to stay. Rotation copies the content to `NAME.log.1`
until nothing is left to copy, and then empties the file. Lines written in the microseconds in between are lost.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 64 * 2**20
NUM_KEPT = 2
"""Rotated files per log: `NAME.log.1` (newer) and `NAME.log.2`."""
TAIL_LINES = 40
TAIL_BYTES = 16_384


def rotate(log: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Empty `log` if it has grown beyond `max_bytes`, and keep a copy. Raises OSError if there is no room; then nothing
    is lost."""
    if log.stat().st_size <= max_bytes:
        return
    copy = log.with_name(f".{log.name}.copy")
    try:
        with log.open("r+b") as source, copy.open("wb") as target:
            shutil.copyfileobj(source, target)
            for number in range(NUM_KEPT, 1, -1):
                if (newer := _older(log, number - 1)).exists():
                    newer.replace(_older(log, number))
            copy.replace(_older(log, 1))
            shutil.copyfileobj(source, target)
            os.truncate(source.fileno(), 0)
    finally:
        copy.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPosition:
    """A position in a log. It stays valid when the log is rotated."""

    size: int = 0
    """Bytes before the position, before any later rotation."""
    older: tuple[int, int] | None = None
    """Identity of `NAME.log.1` at that time; None if there was no such file."""


def end_of(log: Path) -> LogPosition:
    """Return the position of the next line."""
    return LogPosition(size=log.stat().st_size if log.exists() else 0, older=_identity(_older(log, 1)))


def quote(log: Path, since: LogPosition) -> str:
    """Return the last lines of a log as text to append to a message."""
    lines = tail(log, since=since)
    if not lines:
        return f"\n  nothing was written to {log}"
    return "\n".join([f"\n  last lines of {log}:", *(f"    {line}" for line in lines)])


def tail(log: Path, num_lines: int = TAIL_LINES, *, since: LogPosition) -> list[str]:
    """Return the last lines of a log after position `since`, across the latest rotation. Empty if there is no file."""
    if _identity(_older(log, 1)) == since.older:
        return _last_lines(log, since.size)[-num_lines:]
    start = since.size if _identity(_older(log, 2)) == since.older else 0
    return (_last_lines(_older(log, 1), start) + _last_lines(log))[-num_lines:]


def _identity(path: Path) -> tuple[int, int] | None:
    """Return inode and modification time, which a rename does not change; None if there is no file."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _older(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def _last_lines(path: Path, start: int = 0) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(start, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip().splitlines()
