"""A live group: admitted, and not yet trained, dropped or given up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.ports import SavedEpisode
from penstock.scheduler.ledger import Ledger
from penstock.types import EpisodeId, EpisodeSummary, PayloadRef, Task


class LiveGroup(msgspec.Struct, kw_only=True, eq=False):
    """What the scheduler knows of one."""

    number: int
    task: Task
    size: int
    """Members, redundant ones included until the group is whole."""
    redundancy: int = 0
    ledger: Ledger
    admitted_at: float
    predicted_tokens: float = 0.0
    attempt: int = 0
    """Grows with every restart, so that messages of an earlier one are recognised."""
    num_failures: int = 0
    num_stale: int = 0
    """Members that were discarded because they were too old to train."""
    num_surplus: int = 0
    """Members that were discarded because the group was whole without them."""
    broken: set[int] = msgspec.field(default_factory=set)
    """Members that failed, and are not needed."""
    worker: str | None = None
    """Who plays it."""
    generating: set[int] = msgspec.field(default_factory=set)
    """Members that hold a segment grant."""
    num_tokens: dict[int, int] = msgspec.field(default_factory=dict)
    """Generated so far by members that asked for another grant."""
    saved: dict[int, SavedEpisode] = msgspec.field(default_factory=dict)
    """Members whose tokens so far lie in the pool."""
    summaries: Sequence[EpisodeSummary] = ()
    """Of the whole group."""
    ref: PayloadRef | None = None

    def keep(self, member: int, ref: PayloadRef | None, summary: EpisodeSummary | None = None) -> None:
        """Remember where the member's tokens lie: a whole record once it ended, with its `summary`, else one more
        piece."""
        if ref is not None:
            episode = EpisodeId(self.task.tag, self.number, member, self.attempt)
            if summary is not None:
                reason, info = summary.stop_reason, summary.info
                saved = SavedEpisode(episode=episode, refs=(ref,), ended=True, stop_reason=reason, info=info)
            else:
                pieces = self.saved[member].refs if member in self.saved else ()
                saved = SavedEpisode(episode=episode, refs=(*pieces, ref), ended=False)
            self.saved[member] = saved

    def spares(self, failed: Iterable[int]) -> bool:
        """Enough members are left if these fail too."""
        return len(self.broken.union(failed)) <= self.redundancy

    def forget(self) -> None:
        """The next attempt starts from nothing."""
        self.saved.clear()
        self.broken.clear()
        self.num_tokens.clear()
