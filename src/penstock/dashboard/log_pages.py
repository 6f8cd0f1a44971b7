"""The log of a process in pages, read backwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.dashboard.growing_file import GrowingFile
from penstock.observe.log_lines import as_last_drawn, without_colours
from penstock.own_files import Foreign

PIECE_BYTES = 1 << 16
MOST_BYTES = 1 << 22
"""Bytes of one page."""


def processes_with_logs(run_dir: Path) -> list[str]:
    """Return the names of the processes that have a log."""
    return sorted(path.stem for path in (run_dir / "logs").glob("*.log"))


def log_page(run_dir: Path, process: str, *, before: int | None, num_lines: int) -> dict[str, Any]:
    """Return the last lines that end before the byte `before` of a log, and where the page before them ends. Raises
    `FileNotFoundError` if the process has no log, and `Foreign` if it is no plain file of a run."""
    if (run_dir / "logs").is_symlink():
        raise Foreign(run_dir / "logs", "is a link")
    path = run_dir / "logs" / f"{process}.log"
    if process not in processes_with_logs(run_dir):
        raise FileNotFoundError(path)
    file = GrowingFile(path)
    end = file.size if before is None else min(before, file.size)
    lines: list[str] = []
    begin = end
    for at, data in file.backwards(end, piece=PIECE_BYTES):
        for line in reversed(_lines(data)):
            if len(lines) >= num_lines:
                return {"lines": lines[::-1], "before": begin}
            begin -= len(line)
            lines.append(without_colours(as_last_drawn(line.rstrip(b"\n"))))
        if end - at > MOST_BYTES:
            break
        begin = at
    return {"lines": lines[::-1], "before": begin or None}


def _lines(data: bytes) -> list[bytes]:
    """Return the lines with their ends, also an unfinished one. A carriage return ends no line."""
    *whole, rest = data.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])
