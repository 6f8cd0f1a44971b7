"""The logs of a run's processes: kept within bounds, and quoted where something failed.

A process holds its log open for appending, so that the file itself has to stay: what it holds is copied to `NAME.log.1`
until nothing is left to copy, and then it is emptied. What is written in the microseconds between the two is lost.
"""

from __future__ import annotations

import os
import shutil
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


def quote(log: Path) -> str:
    """The last lines of a log, to be appended to a message."""
    lines = tail(log)
    if not lines:
        return f"\n  its log {log} is empty"
    return "\n".join([f"\n  last lines of {log}:", *(f"    {line}" for line in lines)])


def tail(log: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log, across its latest rotation; none if there is no such file."""
    return (_last_lines(_older(log, 1)) + _last_lines(log))[-num_lines:]


def _older(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")


def _last_lines(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip().splitlines()
