"""The kept samples of a run: `trajectories/step_*.jsonl`, one group per file. Their texts, and their tokens if the run
kept them, outlive the pool's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.trajectory_dump import KEPT_TOKENS
from penstock.own_files import read_document
from penstock.ports.group_records import GroupRecord
from penstock.processes.dumping import TRAJECTORIES
from penstock.store.dumps.writer import SAMPLES
from penstock.types import EpisodeId, EpisodeSummary

Row = dict[str, Any]

_row_decoder = msgspec.json.Decoder(Row)


@dataclass(frozen=True, slots=True)
class _File:
    """What is remembered of a file."""

    stamp: tuple[int, int]
    """Its size and the time of its last change."""
    record: GroupRecord | None
    has_tokens: Mapping[int, bool]
    """By member: whether the sample has its tokens."""


class KeptSamples:
    """Reads the kept samples. Files are read again only if they have changed."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / TRAJECTORIES
        self._files: dict[Path, _File] = {}

    def records(self) -> dict[int, GroupRecord]:
        """Return what the samples know of their groups, by number."""
        return {file.record.group: file.record for file in self._known().values() if file.record is not None}

    def members(self) -> dict[int, Mapping[int, bool]]:
        """Return the kept members of each group, and whether each has its tokens. A later sample replaces an
        earlier one."""
        return {file.record.group: file.has_tokens for file in self._known().values() if file.record is not None}

    def rows(self, group: int) -> list[Row]:
        """Return the kept rows of a group, in the order of its members; none if it was not kept."""
        rows: list[Row] = []
        for path, file in self._known().items():
            if file.record is not None and file.record.group == group:
                rows = _read(path)
        return sorted(rows, key=lambda row: row["episode"])

    def _known(self) -> Mapping[Path, _File]:
        files: dict[Path, _File] = {}
        for path in sorted(self._directory.glob(SAMPLES)):
            try:
                found = path.lstat()
            except OSError:
                continue
            stamp, known = (found.st_size, found.st_mtime_ns), self._files.get(path)
            files[path] = known if known is not None and known.stamp == stamp else _file(path, stamp)
        self._files = files
        return files


def _file(path: Path, stamp: tuple[int, int]) -> _File:
    rows = _read(path)
    tokens = {row["episode"]: row.get(KEPT_TOKENS) is not None for row in rows}
    return _File(stamp, _record(rows), tokens)


def _read(path: Path) -> list[Row]:
    """Return the rows of a file; damaged lines, and lines of other groups than the first, are left out."""
    try:
        lines = read_document(path).splitlines()
    except OSError:
        return []
    rows = list[Row]()
    for line in lines:
        try:
            row = _row_decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            continue
        match row:
            case {"group": int(group), "episode": int(), "reward": int() | float()}:
                if not rows or group == rows[0]["group"]:
                    rows.append(row)
    return rows


def _record(rows: list[Row]) -> GroupRecord | None:
    """Return the record of a group by its rows, as far as they have its facts."""
    if not rows:
        return None
    first = rows[0]
    episodes = [summary for row in rows if (summary := summary_of(row)) is not None]
    return GroupRecord(
        group=first["group"],
        task_id=str(first.get("task_id") or ""),
        task_index=first["task_index"] if isinstance(first.get("task_index"), int) else 0,
        episodes=episodes,
        state="collected",
        attempt=episodes[0].episode.attempt if episodes else 0,
    )


def summary_of(row: Mapping[str, Any]) -> EpisodeSummary | None:
    """Return the summary of a row; None if it does not have the types of one."""
    tag, attempt = row.get("tag"), row.get("attempt")
    known = {name: row[name] for name in SUMMARY if row.get(name) is not None}
    for name in ("min", "max"):
        if (version := row.get(f"policy_version_{name}")) is not None:
            known[f"version_{name}"] = version
    episode = EpisodeId(str(tag), row["group"], row["episode"], attempt if isinstance(attempt, int) else 0)
    try:
        return msgspec.convert({**known, "episode": episode}, EpisodeSummary, strict=True)
    except msgspec.ValidationError:
        return None


SUMMARY = ("status", "stop_reason", "error", "reward", "num_turns", "seconds", "prompt_tokens", "response_tokens")
