"""The logs of a run's processes: kept within bounds, and quoted where something failed.

A process holds its log open for appending, so that the file itself has to stay: what it holds is copied to `NAME.log.1`
until nothing is left to copy, and then it is emptied. What is written in the microseconds between the two is lost.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 64 * 2**20
NUM_KEPT = 2
"""`NAME.log.1`, the newer one, and `NAME.log.2`."""
TAIL_LINES = 40
TAIL_BYTES = 16_384


def rotate(log: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Make `log` empty if it has grown beyond `max_bytes`. OSError, with nothing lost, if there is no room."""
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
class Place:
    """A place in a log, which is found again after the log was rotated."""

    size: int = 0
    """Bytes before it, in the log as it was."""
    older: tuple[int, int] | None = None
    """What the latest rotation had left by then, if anything."""


def end_of(log: Path) -> Place:
    """Where the next line goes."""
    try:
        size = log.stat().st_size
    except OSError:
        size = 0
    return Place(size=size, older=_identity(_older(log, 1)))


def quote(log: Path, since: Place) -> str:
    """The last lines of a log, to be appended to a message."""
    lines = tail(log, since=since)
    if not lines:
        return f"\n  nothing was written to {log}"
    return "\n".join([f"\n  last lines of {log}:", *(f"    {line}" for line in lines)])


def tail(log: Path, num_lines: int = TAIL_LINES, *, since: Place) -> list[str]:
    """The last lines of a log from a place on, across its latest rotation; none if there is no such file."""
    if _identity(_older(log, 1)) == since.older:
        return _last_lines(log, since.size)[-num_lines:]
    start = since.size if _identity(_older(log, 2)) == since.older else 0
    return (_last_lines(_older(log, 1), start) + _last_lines(log))[-num_lines:]


def _identity(path: Path) -> tuple[int, int] | None:
    """Stays the same when a file is renamed; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


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
