"""The experience pool of the controller: groups enter, change state and end, and unneeded files are removed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from penstock.ports.group_records import EndedGroup, GroupRecord
from penstock.store.index import PoolIndex
from penstock.store.payload_files import is_whole, remove_files, sync_files
from penstock.types import EpisodeState, PayloadRef, Summaries, Task

AT_ONCE_S = 0.05
"""Seconds of reading records before other asyncio tasks run, so that the controller stays responsive."""


class ExperiencePool(PoolIndex):
    """The index and the token files of the pool. Implements the loop's `Pool`."""

    def __init__(self, directory: Path) -> None:
        """Open the pool in `directory` and read its records. A large pool needs seconds, so call this in a thread.

        Raises `PoolUnreadable`.
        """
        super().__init__(directory)
        self._needed: dict[int, GroupRecord] = {}
        """Groups that no durable checkpoint is known to cover yet, without their episodes. Collected groups are not
        included: no checkpoint ever covers them."""
        self._remember(self.records())

    async def each_record(self) -> AsyncIterator[GroupRecord]:
        """Yield all records as `records` does. Let other asyncio tasks run in between."""
        pause_at = time.monotonic() + AT_ONCE_S
        for record in self.records():
            yield record
            if time.monotonic() >= pause_at:
                await asyncio.sleep(0)
                pause_at = time.monotonic() + AT_ONCE_S

    def put(self, records: Sequence[GroupRecord]) -> None:
        self._remember(records)
        super().put(records)

    def _remember(self, records: Iterable[GroupRecord]) -> None:
        for record in records:
            if record.state == EpisodeState.COLLECTED:
                self._needed.pop(record.group, None)
            else:
                self._needed[record.group] = replace(record, episodes=[])

    def admit_groups(self, groups: Sequence[tuple[int, Task]]) -> None:
        known = {record.group: record for record in self.get_groups([group for group, _ in groups])}
        records = []
        for group, task in groups:
            record = GroupRecord(group=group, task_id=task.task_id, task_index=task.index, admitted_at=time.time())
            if before := known.get(group):
                record = replace(record, admitted_at=before.admitted_at, attempt=before.next_attempt)
            records.append(record)
        self.put(records)

    def add_group(self, group: int, task: Task, ref: PayloadRef, episodes: Summaries) -> None:
        facts = {"ref": ref, "episodes": list(episodes), "attempt": episodes[0].episode.attempt}
        self.put([replace(self._needed[group], state=EpisodeState.READY, **facts)])

    def end_groups(self, groups: Sequence[EndedGroup]) -> None:
        ends = {each.group: each for each in groups}

        def end(record: GroupRecord) -> GroupRecord:
            ended = ends[record.group]
            return replace(record, state=ended.state, counts=ended.counts, trained_in=ended.trained_in)

        self.change(list(ends), end)

    def revive_groups(self, groups: Sequence[int]) -> None:
        self.change(groups, lambda record: replace(record, state=EpisodeState.READY, counts={}, trained_in=None))

    def free_covered(self, policy_version: int, *, keep: Collection[int] = ()) -> None:
        held = self._needed.items()
        self._needed = {group: record for group, record in held if group in keep or _is_needed(record, policy_version)}
        oldest = min((record.admitted_at for record in self._needed.values()), default=time.time())
        remove_files(self._directory, written_before=oldest, keep=self._needed_files())

    def is_whole(self, ref: PayloadRef) -> bool:
        return is_whole(self._directory, ref)

    def sync(self) -> None:
        sync_files(self._directory, self._needed_files())
        self.sync_index()

    def _needed_files(self) -> set[str]:
        return {record.ref.file for record in self._needed.values() if record.ref is not None}


def _is_needed(record: GroupRecord, policy_version: int) -> bool:
    """Return whether a run that continues from `policy_version` needs the tokens of the group."""
    has_ended = record.state not in (EpisodeState.PENDING, EpisodeState.READY)
    return not has_ended or (record.trained_in is not None and record.trained_in > policy_version)
