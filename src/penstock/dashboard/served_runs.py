"""Which runs the dashboard shows: those in the directory of runs, and those that the command names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.observe import jsonl
from penstock.own_files import is_ours
from penstock.supervisor.known_runs import describe, directories, has_ended
from penstock.supervisor.run_journal import holds_run
from penstock.supervisor.run_status import DAMAGED

Row = dict[str, Any]
Stamps = tuple[tuple[int, int, int] | None, ...]

RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@ -]{0,199}")
EVENTS_BYTES = 4 << 20
"""Bytes at the end of the events in which the latest held-out reward is looked for."""
KEPT = ("status", "environment", "pipeline", "simulated", "started", "wall_seconds", "step", "steps", "reward")
READ = ("state.json", "config.yaml", "metrics.jsonl", "events.jsonl")
"""Files that a row is made of."""


class ServedRuns:
    """Finds runs by their id."""

    def __init__(self, runs_dir: Path, named: Sequence[Path] = ()) -> None:
        """`named`: directories of runs, which may belong to another user. With some, the others are shown too."""
        self._runs_dir = runs_dir
        self._named = {run_dir.name: run_dir for run_dir in named}
        self._rows: dict[Path, tuple[Stamps, Row]] = {}
        """Rows of runs that have ended, with the stamps of their files."""

    def find(self, run_id: str) -> Path | None:
        """Return the directory of a run; None if no run has this id."""
        if (named := self._named.get(run_id)) is not None:
            return named if holds_run(named) else None
        if not RUN_ID.fullmatch(run_id):
            return None
        run_dir = self._runs_dir / run_id
        is_run = is_ours(run_dir) and is_ours(run_dir.resolve()) and holds_run(run_dir)
        return run_dir.resolve() if is_run else None

    def rows(self) -> list[Row]:
        """Return a summary of each run, the newest first."""
        found = {path.name: path for path in directories(self._runs_dir)} | self._named
        rows = [self._row(run_dir) for run_dir in found.values() if holds_run(run_dir)]
        return sorted(rows, key=lambda row: (row["started"] or 0.0, row["id"]), reverse=True)

    def _row(self, run_dir: Path) -> Row:
        stamps = tuple(_stamp(run_dir / name) for name in READ)
        before = self._rows.get(run_dir)
        if before is not None and before[0] == stamps:
            return before[1]
        row = _row(run_dir)
        if has_ended(row["status"]):
            self._rows[run_dir] = (stamps, row)
        return row


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with the content of a file; None if there is no file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _row(run_dir: Path) -> Row:
    try:
        found = {**describe(run_dir), "held_out": _held_out(run_dir)}
    except (OSError, *DAMAGED):
        found = {"status": "unreadable", "held_out": None}
    return {"id": run_dir.name, **{key: found.get(key) for key in (*KEPT, "held_out")}}


def _held_out(run_dir: Path) -> float | None:
    """Return the reward of the latest evaluation; None if there is none."""
    try:
        events = jsonl.tail(run_dir / "events.jsonl", EVENTS_BYTES)
    except OSError:
        return None
    for event in reversed(events):
        reward = event.get("reward")
        if event.get("event") == "evaluation" and isinstance(reward, int | float):
            return float(reward)
    return None
