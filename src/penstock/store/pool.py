"""The experience pool as the controller sees it: groups enter with their reference, and change state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.store.index import GroupRecord, PoolIndex
from penstock.types import EpisodeSummary, PayloadRef, Task


class ExperiencePool:
    """The index behind the loop's `Pool`."""

    def __init__(self, directory: Path) -> None:
        self._index = PoolIndex(directory)

    def add(self, group: int, task: Task, ref: PayloadRef | None, episodes: Sequence[EpisodeSummary]) -> None:
        self._index.put(
            GroupRecord(group=group, task_id=task.task_id, task_index=task.index, ref=ref, episodes=list(episodes))
        )

    def mark(self, groups: Sequence[int], state: str, *, trained_in: int | None = None) -> None:
        self._index.mark(groups, state, trained_in=trained_in)

    def get(self, group: int) -> GroupRecord | None:
        """What is known of a played group."""
        return self._index.get(group)

    def sync(self) -> None:
        self._index.sync()

    def close(self) -> None:
        self._index.close()
