"""The experience pool as the controller sees it: groups enter, change state, end; files that nobody needs go."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from penstock.ports import EndedGroup, GroupRecord, Shard
from penstock.store.index import PoolIndex
from penstock.store.payload import is_whole, remove_files, sync_files
from penstock.types import EpisodeState, EpisodeSummary, PayloadRef, Task


@dataclass(frozen=True, slots=True)
class Needed:
    """A group whose tokens may still be read."""

    admitted_at: float
    file: str | None = None
    ended: bool = False
    trained_in: int | None = None

    def by(self, policy_version: int) -> bool:
        """Whether somebody who goes on from `policy_version` needs it."""
        return not self.ended or (self.trained_in is not None and self.trained_in > policy_version)


class ExperiencePool:
    """The index behind the loop's `Pool`, and the tokens' files."""

    def __init__(self, directory: Path) -> None:
        """Raises `PoolUnreadable`."""
        self._directory = directory
        self._index = PoolIndex(directory)
        self._needed = {r.group: _needed(r) for r in self._index if r.state != EpisodeState.COLLECTED}
        """Groups whose tokens are not known to be covered by durable checkpoints, but for those that never will be."""

    def admit(self, groups: Sequence[tuple[int, Task]]) -> None:
        now, records = time.time(), []
        known = {record.group: record for record in self._index.get([number for number, _ in groups])}
        for number, task in groups:
            since, attempt = (known[number].admitted_at, known[number].next_attempt) if number in known else (now, 0)
            self._needed[number] = Needed(since)
            records.append(
                GroupRecord(
                    group=number, task_id=task.task_id, task_index=task.index, admitted_at=since, attempt=attempt
                )
            )
        self._index.put(records)

    def add(self, group: int, task: Task, ref: PayloadRef, episodes: Sequence[EpisodeSummary]) -> None:
        since = self._needed[group].admitted_at
        self._needed[group] = Needed(since, ref.file)
        self._index.put(
            [
                GroupRecord(
                    group=group,
                    task_id=task.task_id,
                    task_index=task.index,
                    admitted_at=since,
                    ref=ref,
                    episodes=list(episodes),
                    state=EpisodeState.READY,
                    attempt=episodes[0].episode.attempt,
                )
            ]
        )

    def end(self, groups: Sequence[EndedGroup]) -> None:
        ended = {each.group: each for each in groups}
        records = []
        for record in self._index.get(list(ended)):
            end = ended[record.group]
            facts = {"state": end.state, "counts": end.counts, "trained_in": end.trained_in}
            records.append(msgspec.structs.replace(record, **facts))
            needed = self._needed.pop(record.group)
            if end.state != EpisodeState.COLLECTED:
                self._needed[record.group] = replace(needed, ended=True, trained_in=end.trained_in)
        self._index.put(records)

    def revive(self, groups: Sequence[int]) -> None:
        records = [
            msgspec.structs.replace(record, state=EpisodeState.READY, counts={}, trained_in=None)
            for record in self._index.get(groups)
        ]
        self._index.put(records)
        self._needed |= {record.group: _needed(record) for record in records}

    def covered(self, policy_version: int, *, keep: Collection[int] = ()) -> None:
        self._needed = {
            group: needed for group, needed in self._needed.items() if needed.by(policy_version) or group in keep
        }
        files = {needed.file for needed in self._needed.values() if needed.file is not None}
        oldest = min((needed.admitted_at for needed in self._needed.values()), default=time.time())
        remove_files(self._directory, written_before=oldest, keep=files)

    def get(self, groups: Sequence[int]) -> list[GroupRecord]:
        return self._index.get(groups)

    def shards(self) -> list[Shard]:
        """Of the dump, whether written or only planned."""
        return self._index.shards()

    def plan(self, shard: Shard) -> None:
        """It is going to be written."""
        self._index.put_shard(shard)

    def written(self, shard: Shard) -> None:
        """It is where it belongs; `shard` says what that took."""
        self._index.put_shard(msgspec.structs.replace(shard, written=True))

    def sync_index(self) -> None:
        """Make what the index knows durable. May be called from a thread."""
        self._index.sync()

    def records(self) -> Iterator[GroupRecord]:
        return iter(self._index)

    @property
    def highest_version(self) -> int:
        return self._index.highest_version

    def raise_version(self, policy_version: int) -> None:
        self._index.raise_version(policy_version)

    def is_whole(self, ref: PayloadRef) -> bool:
        return is_whole(self._directory, ref)

    def sync(self) -> None:
        sync_files(self._directory, {needed.file for needed in self._needed.values() if needed.file is not None})
        self._index.sync()

    def close(self) -> None:
        self._index.close()


def _needed(record: GroupRecord) -> Needed:
    return Needed(
        record.admitted_at,
        record.ref.file if record.ref is not None else None,
        record.state not in (EpisodeState.PENDING, EpisodeState.READY),
        record.trained_in,
    )
