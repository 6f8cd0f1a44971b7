"""The experience pool: its index, which survives the processes of a run, and the dumps made from it."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Collection, Sequence
from typing import Protocol

from penstock.ports.group_records import EndedGroup, GroupRecord, Shard
from penstock.types import EpisodeState, GroupAttempt, PayloadRef, Summaries, Task
from penstock.version_history import VersionHistory


class Pool(Protocol):
    """The index of the experience pool: the state of every training group, and where its tokens are."""

    def admit_groups(self, groups: Sequence[tuple[int, Task]]) -> None:
        """Record groups as `pending`: new groups, or known groups that will be played again."""

    def add_group(self, group: int, task: Task, ref: PayloadRef, episodes: Summaries) -> None:
        """Record a completed group as `ready`."""

    def end_groups(self, groups: Sequence[EndedGroup]) -> None:
        """Record the final states of groups."""

    def revive_groups(self, groups: Sequence[int]) -> None:
        """Record trained groups as `ready` again, after the loss of the weights that they trained."""

    def free_covered(self, policy_version: int, *, keep: Collection[int] = ()) -> None:
        """Free the tokens of ended groups that a durable checkpoint of `policy_version` covers.

        Tokens of groups in `keep`, and of groups trained later, stay.
        """

    def each_record(self) -> AsyncIterator[GroupRecord]:
        """Yield the records of all groups, in the order of their admission. Errors, texts and info are left out."""

    def get_groups(self, groups: Sequence[int]) -> list[GroupRecord]:
        """Return the records of `groups`. Unknown groups are left out, and so are errors, texts and info."""

    def shards(self) -> list[Shard]:
        """Return the shards of the dump, both written and planned."""

    def is_whole(self, ref: PayloadRef) -> bool:
        """Return whether the tokens at `ref` are complete and undamaged."""

    @property
    def highest_version(self) -> int:
        """Return the highest policy_version of this run so far."""

    @property
    def history(self) -> VersionHistory:
        """Return the versions of this run that were restored."""

    def raise_version(self, policy_version: int, *, weights_of: int) -> None:
        """Reserve `policy_version` before anything is trained into it. It has the weights of version `weights_of`: an
        earlier one that is restored, or itself."""

    def sync(self) -> None:
        """Write all changes so far to disk."""

    def close(self) -> None: ...


class Dump(Protocol):
    """A writer of completed groups that runs beside the loops. Only `finish` waits."""

    @property
    def unwritten(self) -> Collection[int]:
        """Return the groups that the dump has not written yet, so that it still needs their tokens."""

    async def restore(self, records: AsyncIterable[GroupRecord]) -> None:
        """Continue the dump of an earlier controller, from the records of its groups."""

    def add_group(self, attempt: GroupAttempt, state: EpisodeState, num_rows: int) -> None:
        """Add a group that is in the pool; `state` is the state of its episodes."""

    def stepped(self, step: int) -> None:
        """Record an optimizer step."""

    async def finish(self) -> None:
        """Write the remaining groups."""
