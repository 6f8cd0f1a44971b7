"""The sweep: what grew too old is dropped before it is trained.

With the learner's token mask it is the guarantee; pacing (`pacing.py`) only saves the compute of work that would be
swept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types import NO_VERSION, EpisodeSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """Hard bound on trained tokens: version being trained - version that generated the token <= max_staleness."""

    max_staleness: int

    def stale(self, summaries: Sequence[EpisodeSummary], *, trained_version: int) -> list[int]:
        """Those (by position) of which even the newest token is too old, so that nothing is left to train."""
        oldest = trained_version - self.max_staleness
        return [number for number, summary in enumerate(summaries) if NO_VERSION != summary.version_max < oldest]
