"""Two bounds on staleness: pace what is admitted, and sweep what grew too old before it is trained.

The sweep (with the learner's token mask) is the guarantee; admission only saves the compute of work that would be
swept.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import NO_VERSION, EpisodeSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionDecision:
    """`num_groups` may be admitted now."""

    num_groups: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionPolicy:
    """Groups in flight never exceed (max_staleness + 1) * groups_per_step.

    AReaL's capacity (eta + v + 1) * B - (accepted + running) (`areal/infra/staleness_manager.py`) with
    accepted = v * B + the groups that wait for training, written without the version: a group is in flight from
    admission until the weights it trained are served, or until it is filtered, failed or discarded. Nothing to reset
    after a resume, and versions skipped by a rewind cannot open a burst.
    """

    max_staleness: int
    groups_per_step: int

    @property
    def capacity(self) -> int:
        return (self.max_staleness + 1) * self.groups_per_step

    def decide(self, *, num_in_flight: int) -> AdmissionDecision:
        room = max(0, self.capacity - num_in_flight)
        return AdmissionDecision(num_groups=room, reason=f"{num_in_flight} of {self.capacity} groups in flight")


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessPolicy:
    """Hard bound on trained tokens: version being trained - version that generated the token <= max_staleness."""

    max_staleness: int

    def is_stale(self, summary: EpisodeSummary, *, trained_version: int) -> bool:
        """True if even the newest token is too old, so that nothing of the episode is left to train."""
        if summary.version_max == NO_VERSION:
            return False
        return trained_version - summary.version_max > self.max_staleness
