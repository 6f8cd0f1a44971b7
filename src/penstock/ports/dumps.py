"""Dumps: tables of training groups, for other programs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from penstock.ports.group_records import GroupRecord
from penstock.types import EpisodeState, GroupAttempt


class Dump(Protocol):
    """A writer of completed groups that runs beside the loops. Only `finish` waits."""

    @property
    def unwritten(self) -> Collection[int]:
        """Return the groups that the dump has not written yet, so that it still needs their tokens."""

    def restore(self, records: Iterable[GroupRecord]) -> None:
        """Continue the dump of an earlier controller, from the records of its groups."""

    def add_group(self, attempt: GroupAttempt, state: EpisodeState, num_rows: int) -> None:
        """Add a group that is in the pool; `state` is the state of its episodes."""

    def stepped(self, step: int) -> None:
        """Record an optimizer step."""

    async def finish(self) -> None:
        """Write the remaining groups."""
