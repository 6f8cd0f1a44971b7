"""When the learner gets work, and how much: N_min samples (whole groups), or T_max with at least one group ready.

`compute` accumulates gradients as groups arrive and steps at a stable batch of `groups_per_step`;
`step` makes every trigger an optimizer step (the design note's literal form).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerState:
    """What the trigger sees."""

    num_ready: int
    """Whole groups ready to train."""
    num_accumulated: int
    """Groups already accumulated towards the next step."""
    waiting_since: float | None
    """When the oldest ready group became ready; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerDecision:
    """Train `num_groups` now and then `step`; or, with 0 groups, look again at `look_again_at` or on an event."""

    num_groups: int
    step: bool
    reason: str
    look_again_at: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CountOrTimeoutTrigger:
    """Fires at `min_groups` ready groups, or when the oldest one has waited `max_wait_s`."""

    use: Literal["compute", "step"]
    min_groups: int
    max_wait_s: float
    groups_per_step: int

    @classmethod
    def from_samples(
        cls,
        *,
        use: Literal["compute", "step"],
        min_samples: int,
        max_wait_s: float,
        group_size: int,
        groups_per_step: int,
    ) -> CountOrTimeoutTrigger:
        """N_min in samples, rounded up to whole groups."""
        min_groups = math.ceil(min_samples / group_size)
        return cls(use=use, min_groups=min_groups, max_wait_s=max_wait_s, groups_per_step=groups_per_step)

    def decide(self, state: TriggerState, *, now: float) -> TriggerDecision:
        room = self.groups_per_step - state.num_accumulated if self.use == "compute" else self.groups_per_step
        wanted = min(self.min_groups, room)
        take = min(state.num_ready, room)
        if state.num_ready >= wanted:
            return self._fire(take, room, f"count: {state.num_ready} groups ready, {wanted} wanted")
        if state.waiting_since is None:
            return TriggerDecision(num_groups=0, step=False, reason="nothing ready")
        expires_at = state.waiting_since + self.max_wait_s
        if now >= expires_at:
            return self._fire(
                take, room, f"timeout: {state.num_ready} groups ready for {now - state.waiting_since:.3f} s"
            )
        return TriggerDecision(
            num_groups=0, step=False, reason=f"{state.num_ready} of {wanted} groups ready", look_again_at=expires_at
        )

    def _fire(self, take: int, room: int, reason: str) -> TriggerDecision:
        return TriggerDecision(num_groups=take, step=self.use == "step" or take == room, reason=reason)
