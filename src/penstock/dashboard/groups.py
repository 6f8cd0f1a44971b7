"""The groups of a run: a table in memory that follows the pool's index, and what was decided about each group.

The table holds a few numbers per group, so that it can be sorted and searched. The rows of a page are read from the
index when they are shown. If the index cannot be read, the groups are those of the kept samples.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from penstock.alarms import HopelessError
from penstock.config import ConfigError
from penstock.dashboard.kept_samples import KeptSamples
from penstock.dashboard.timeline_index import TimelineIndex
from penstock.ports.group_records import GroupRecord
from penstock.store.index import GroupOutline, PoolIndex, open_index
from penstock.types import NO_VERSION, EpisodeState, EpisodeSummary
from penstock.version_history import VersionHistory

Sort = Literal["newest", "oldest", "best", "worst", "spread"]
SORTS: tuple[str, ...] = get_args(Sort)
Status = Literal["pending", "ready", "trained", "collected", "filtered", "discarded", "failed", "cancelled"]
STATUSES: tuple[str, ...] = get_args(Status)
STATUS_OF: Mapping[str, str] = {
    EpisodeState.DISCARDED_STALE: "discarded",
    EpisodeState.DISCARDED_SURPLUS: "discarded",
}
"""Names that the table has for states of the index, where they differ."""
FINAL = frozenset(STATUSES) - {"pending", "ready"}
TOO_OLD = "every token is older than scheduler.max_staleness"
MAX_ROWS = 500
"""Most rows of one page."""


class UnknownGroup(LookupError):
    """The run has no such group."""


class BadQuery(ValueError):
    """A parameter of a request has no meaning. The message names it."""


@dataclass(slots=True)
class _Columns:
    """What the table knows of each group, by its place. Groups are in the order of their numbers."""

    numbers: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    status: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    lowest: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    highest: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Rewards of the worst and of the best member; NaN without episodes."""
    spread: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    tags: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Number of the tag; -1 if it is unknown."""
    task_ids: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.task_ids)


ARRAYS = ("numbers", "status", "lowest", "highest", "spread", "tags")


_reading = threading.Lock()
"""Held by the thread that reads an index: LMDB allows a process to open an index once at a time, and for a moment two
objects may show one run."""


class Groups:
    """The groups of one run. Its methods may be called from any thread."""

    def __init__(self, run_dir: Path, samples: KeptSamples, timeline: TimelineIndex) -> None:
        """`timeline`: knows why groups were dropped, as far as it was read."""
        self._run_dir, self._samples, self._timeline = run_dir, samples, timeline
        self._columns = _Columns()
        self._tag_numbers: dict[str, int] = {}
        self._revision = -1
        self._index_file: tuple[int, int] | None = None
        """Device and inode of the index that was read."""
        self._history = VersionHistory()
        self._unreadable: str | None = None
        """Why the index cannot be read."""

    @property
    def history(self) -> VersionHistory:
        return self._history

    def page(
        self,
        *,
        sort: str = "newest",
        text: str = "",
        status: str = "",
        tag: str = "",
        offset: int = 0,
        limit: int = 50,
    ) -> dict[str, Any]:
        """Return a page of the table. Raises `BadQuery`.

        `sort`: `best` begins with the group of the best member, `worst` with that of the worst one. `text`: words of
        the task id or of the reason for which a group was dropped, or the number of a group.
        """
        if sort not in SORTS:
            raise BadQuery(f"sort {sort!r}: there are {', '.join(SORTS)}")
        if status and status not in STATUSES:
            raise BadQuery(f"status {status!r}: there are {', '.join(STATUSES)}")
        if offset < 0 or not 0 < limit <= MAX_ROWS:
            raise BadQuery(f"offset {offset}, limit {limit}: offsets begin at 0, limits are 1 to {MAX_ROWS}")
        indexed = self._timeline.indexed
        with _reading:
            records = self._refresh_and_read(
                lambda: self._chosen(sort, text.strip().lower(), status, tag), offset, limit
            )
        found, total, tags, counts = records
        warnings, kept = [self._unreadable] if self._unreadable else [], self._samples.members()
        return {
            "groups": [self._row(record, kept.get(record.group, {})) for record in found],
            "total": total,
            "counts": counts,
            "tags": tags,
            "indexed": indexed,
            "warnings": warnings,
        }

    def _refresh_and_read(
        self, chosen: Callable[[], npt.NDArray[np.int64]], offset: int, limit: int
    ) -> tuple[list[GroupRecord], int, list[str], dict[str, int]]:
        """Return the records of a page, the number of chosen groups, all tags, and the number of groups by status."""
        self._unreadable = None
        try:
            with open_index(self._run_dir, setting="the groups") as index:
                self._refresh(index)
                numbers = chosen()
                records = index.get_groups(numbers[offset : offset + limit].tolist())
        except (ConfigError, HopelessError, OSError) as error:
            self._unreadable = str(error)
            self._read_samples()
            numbers = chosen()
            kept = self._samples.records()
            records = [kept[number] for number in numbers[offset : offset + limit].tolist()]
        amounts = np.bincount(self._columns.status, minlength=len(STATUSES)).tolist()
        counts = {name: amount for name, amount in zip(STATUSES, amounts, strict=True) if amount}
        return records, len(numbers), sorted(self._tag_numbers), counts

    def record(self, group: int) -> GroupRecord:
        """Return the whole record of a group, or what the kept samples know of it. Raises `UnknownGroup`."""
        with _reading:
            try:
                with open_index(self._run_dir, setting="the groups") as index:
                    self._history = index.history
                    found = index.get_whole_groups([group])
            except (ConfigError, HopelessError, OSError):
                found = []
        record = found[0] if found else self._samples.records().get(group)
        if record is None:
            raise UnknownGroup(
                f"run {self._run_dir.name} has no record of group {group}: groups of held-out tasks leave none, and "
                "others get one when they are admitted"
            )
        return record

    def group(self, group: int) -> dict[str, Any]:
        """Return a group's row and its members. Raises `UnknownGroup`."""
        record = self.record(group)
        in_pool, kept = self._has_pool_file(record), self._samples.members().get(group, {})
        members = []
        for each in record.episodes:
            place = each.episode.episode
            members.append(
                {
                    **_outcome(each),
                    "has_text": in_pool or place in kept,
                    "has_tokens": in_pool or kept.get(place, False),
                }
            )
        return {**self._row(record, kept), "members": members}

    def _row(self, record: GroupRecord, kept: Mapping[int, bool]) -> dict[str, Any]:
        """Return a row. `kept`: the members with a kept sample, and whether it has tokens."""
        rewards = [each.reward for each in record.episodes]
        versions = [v for each in record.episodes for v in (each.version_min, each.version_max) if v != NO_VERSION]
        status = _status(record.state)
        drop, in_pool = self._timeline.drops.of_group(record.group), self._has_pool_file(record)
        reason = drop.reason if status in ("filtered", "failed", "discarded", "pending") else None
        if reason is None and record.state == EpisodeState.DISCARDED_STALE:
            reason = TOO_OLD
        return {
            "group": record.group,
            "task_id": record.task_id,
            "tag": record.episodes[0].episode.tag if record.episodes else None,
            "status": status,
            "reason": reason,
            "reward_mean": _finite(fmean(rewards)) if rewards else None,
            "reward_std": _finite(pstdev(rewards)) if rewards else None,
            "rewards": [_finite(reward) for reward in rewards],
            "lengths": [each.response_tokens for each in record.episodes],
            "turns_mean": fmean(each.num_turns for each in record.episodes) if record.episodes else None,
            "policy_version_min": min(versions, default=None),
            "policy_version_max": max(versions, default=None),
            "step": step_of(record, self._history),
            "num_failed": drop.num_failed,
            "attempt": record.attempt,
            "has_tokens": in_pool or any(kept.values()),
            "has_text": in_pool or bool(kept),
            "time": record.admitted_at or None,
        }

    def _has_pool_file(self, record: GroupRecord) -> bool:
        if record.ref is None or "/" in record.ref.file:
            return False
        with suppress(OSError, ValueError):
            return (self._run_dir / "pool" / record.ref.file).is_file()
        return False

    def _chosen(self, sort: str, text: str, status: str, tag: str) -> npt.NDArray[np.int64]:
        """Return the numbers of the groups to show, in order."""
        columns = self._columns
        chosen = np.ones(len(columns), dtype=np.bool_)
        if status:
            chosen &= columns.status == STATUSES.index(status)
        if tag:
            chosen &= columns.tags == self._tag_numbers.get(tag, -2)
        if sort in ("best", "worst", "spread"):
            chosen &= ~np.isnan(columns.highest)
        if text:
            chosen &= self._matching(text, chosen)
        places = np.flatnonzero(chosen)
        match sort:
            case "newest":
                places = places[::-1]
            case "best":
                places = places[::-1][np.argsort(-columns.highest[places[::-1]], kind="stable")]
            case "worst":
                places = places[::-1][np.argsort(columns.lowest[places[::-1]], kind="stable")]
            case "spread":
                places = places[::-1][np.argsort(-columns.spread[places[::-1]], kind="stable")]
        return columns.numbers[places]

    def _matching(self, text: str, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which groups have the text in their task id or reason, or are the group with this number."""
        columns, found = self._columns, np.zeros(len(chosen), dtype=np.bool_)
        dropped = self._timeline.drops.with_reason(text)
        number = int(text) if text.isdecimal() and len(text) < 19 else None
        for place in np.flatnonzero(chosen).tolist():
            group = int(columns.numbers[place])
            found[place] = text in columns.task_ids[place].lower() or group == number or group in dropped
        return found

    def _refresh(self, index: PoolIndex) -> None:
        """Read what the index has new. Groups that have ended change only if weights are restored."""
        columns, file = self._columns, index.file
        if file != self._index_file or index.history != self._history or index.num_groups < len(columns):
            self._columns = columns = _Columns()
            self._revision, self._index_file, self._history = -1, file, index.history
        revision = index.revision
        if revision == self._revision:
            return
        final = np.isin(columns.status, [STATUSES.index(name) for name in FINAL])
        unended = np.flatnonzero(~final)
        if len(unended):  # those from the first one on are read again
            self._cut(int(unended[0]))
        first = int(self._columns.numbers[-1]) + 1 if len(self._columns) else 0
        self._extend(index.outlines(first=first))
        if index.num_groups != len(self._columns):  # a group was added before others
            self._columns = _Columns()
            self._extend(index.outlines())
        self._revision = revision

    def _read_samples(self) -> None:
        """Fill the table from the kept samples."""
        self._columns, self._revision, self._index_file = _Columns(), -1, None
        records = self._samples.records()
        self._extend(records[number] for number in sorted(records))

    def _cut(self, length: int) -> None:
        columns = self._columns
        for name in ARRAYS:
            setattr(columns, name, getattr(columns, name)[:length])
        del columns.task_ids[length:]

    def _extend(self, outlines: Iterator[GroupOutline] | Iterator[GroupRecord]) -> None:
        numbers, status, lowest, highest, spread, tags, task_ids = [], [], [], [], [], [], []
        for each in outlines:
            rewards = [episode.reward for episode in each.episodes]
            numbers.append(each.group)
            status.append(STATUSES.index(_status(each.state)))
            lowest.append(min(rewards, default=math.nan))
            highest.append(max(rewards, default=math.nan))
            spread.append(_deviation(rewards))
            tag = each.episodes[0].episode.tag if rewards else None
            tags.append(-1 if tag is None else self._tag_numbers.setdefault(tag, len(self._tag_numbers)))
            task_ids.append(each.task_id)
        columns = self._columns
        for name, values in zip(ARRAYS, (numbers, status, lowest, highest, spread, tags), strict=True):
            known = getattr(columns, name)
            setattr(columns, name, np.concatenate([known, np.asarray(values, dtype=known.dtype)]))
        columns.task_ids += task_ids


def step_of(record: GroupRecord, history: VersionHistory) -> int | None:
    """Return the optimizer step that trained the group: the steps from version 0 to the version that it made."""
    return None if record.trained_in is None else history.steps_between(0, record.trained_in)


def _outcome(summary: EpisodeSummary) -> dict[str, Any]:
    names = ("status", "stop_reason", "num_turns", "prompt_tokens", "response_tokens", "seconds", "env_s", "reward_s")
    return {
        "episode": summary.episode.episode,
        "attempt": summary.episode.attempt,
        "reward": _finite(summary.reward),
        **{name: getattr(summary, name) for name in names},
        "policy_version_min": version_or_none(summary.version_min),
        "policy_version_max": version_or_none(summary.version_max),
        "metrics": summary.metrics,
        "error": summary.error,
    }


def version_or_none(policy_version: int) -> int | None:
    return None if policy_version == NO_VERSION else policy_version


def _status(state: str) -> str:
    named = STATUS_OF.get(state, str(state))
    return named if named in STATUSES else "pending"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _deviation(rewards: Sequence[float]) -> float:
    if not rewards:
        return math.nan
    mean = sum(rewards) / len(rewards)
    return math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / len(rewards))
