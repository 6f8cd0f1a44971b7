"""The sweep: what grew too old is dropped before it is trained.

With the learner's token mask it is the guarantee; pacing (`pacing.py`) only saves the compute of work that would be
swept.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import NO_VERSION, EpisodeSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """Hard bound on trained tokens: version being trained - version that generated the token <= max_staleness."""

    max_staleness: int

    def is_stale(self, summary: EpisodeSummary, *, trained_version: int) -> bool:
        """True if even the newest token is too old, so that nothing of the episode is left to train."""
        if summary.version_max == NO_VERSION:
            return False
        return trained_version - summary.version_max > self.max_staleness
