"""Records of the pool's index: groups, and the shards of dumps made from them."""

from __future__ import annotations

import msgspec

from penstock.types import EpisodeState, EpisodeSummary, GroupAttempt, PayloadRef


class EndedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A training group that has ended."""

    group: int
    counts: dict[EpisodeState, int]
    """Number of its episodes by final state."""
    trained_in: int | None = None
    """Policy version made by the step that trained it."""

    @property
    def state(self) -> EpisodeState:
        """Return TRAINED if the group was trained, else the state of most members."""
        if self.trained_in is not None:
            return EpisodeState.TRAINED
        return max(self.counts, key=self.counts.__getitem__)


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the pool knows of an admitted group, except its tokens.

    The records of all groups are enough to restore ledger and queues.
    """

    group: int
    task_id: str
    task_index: int
    admitted_at: float = 0.0
    """Seconds since the epoch."""
    ref: PayloadRef | None = None
    """Location of the tokens of a completed group."""
    episodes: list[EpisodeSummary] = []
    state: str = "pending"
    """`pending` (not completed), `ready` (not trained yet), or the final state as in `EndedGroup.state`."""
    counts: dict[EpisodeState, int] = {}
    """See `EndedGroup`; empty until the group ends."""
    trained_in: int | None = None
    attempt: int = 0
    """Attempt that completed the group. For a pending group, an attempt that never started."""

    @property
    def group_attempt(self) -> GroupAttempt:
        return GroupAttempt(self.group, self.attempt)

    @property
    def next_attempt(self) -> int:
        """Return the number of the next attempt, if the group is played again."""
        return self.attempt + (self.ref is not None)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a dump: its name and its groups."""

    name: str
    groups: list[GroupAttempt]
    step: int | None = None
    """Optimizer step after which the shard was planned; None without a trainer."""
    written: bool = False
    num_rows: int = 0
    num_misfits: int = 0
    """Values of environments that did not fit their columns, and were written as null."""
    cpu_s: float = 0.0
    """CPU seconds for writing the shard. Like the numbers above, known once the shard is written."""
