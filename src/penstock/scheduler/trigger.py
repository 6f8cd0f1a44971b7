"""When the learner gets work, and how much: N_min samples (whole groups), or T_max with at least one group ready.

`compute` accumulates gradients as groups arrive and steps at a stable batch of `groups_per_step`;
`step` makes every trigger an optimizer step (the design note's literal form);
`batch` waits for a whole step's groups and knows no T_max (the fixed-batch baseline).
Feedback scales N_min and T_max within hard bounds; without feedback they are what the user typed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.config.scheduling import TriggerConfig


class TriggerState(msgspec.Struct, frozen=True, kw_only=True):
    """What the trigger sees."""

    num_ready: int
    """Whole groups ready to train."""
    num_accumulated: int
    """Groups already accumulated towards the next step."""
    waiting_since: float | None
    """When the oldest ready group became ready; None if there is none."""
    samples_factor: float = 1.0
    wait_factor: float = 1.0
    """Of N_min and T_max, as feedback decided them."""


class TriggerDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Train `num_groups` now and then `step`; or, if neither, look again at `look_again_at` or on an event."""

    num_groups: int
    step: bool
    reason: str
    look_again_at: float = math.inf

    @property
    def fires(self) -> bool:
        return self.num_groups > 0 or self.step


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """N_min in whole groups, T_max in seconds (infinite where nothing but the count fires)."""

    min_groups: int
    max_wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trigger:
    """Fires at N_min ready groups, or when the oldest one has waited T_max."""

    use: Literal["compute", "step", "batch"]
    min_samples: int
    max_wait_s: float
    group_size: int
    groups_per_step: int
    adapts: bool
    """Feedback is on: the bounds below hold."""
    fewest_samples: int
    most_samples: int
    shortest_wait_s: float
    longest_wait_s: float

    @classmethod
    def from_config(cls, config: TriggerConfig, *, group_size: int, groups_per_step: int) -> Trigger:
        feedback, whole = config.feedback, group_size * groups_per_step
        return cls(
            use=config.use,
            min_samples=config.samples_of(whole),
            max_wait_s=config.max_wait_s,
            group_size=group_size,
            groups_per_step=groups_per_step,
            adapts=feedback.signal != "none",
            fewest_samples=feedback.fewest_samples,
            most_samples=min(feedback.most_samples or whole, whole),
            shortest_wait_s=feedback.shortest_wait_s,
            longest_wait_s=feedback.longest_wait_s,
        )

    def thresholds(self, state: TriggerState) -> Thresholds:
        """N_min and T_max under the state's factors. N_min is clamped in samples, then rounded up to whole groups."""
        if self.use == "batch":
            return Thresholds(min_groups=self.groups_per_step, max_wait_s=math.inf)
        samples, wait_s = float(self.min_samples), self.max_wait_s
        if self.adapts:
            samples = min(max(samples * state.samples_factor, self.fewest_samples), self.most_samples)
            wait_s = min(max(wait_s * state.wait_factor, self.shortest_wait_s), self.longest_wait_s)
        # 33.000000000000004 samples, the product of two rounded numbers, are 33
        min_groups = max(math.ceil(samples / self.group_size - 1e-9), 1)
        return Thresholds(min_groups=min_groups, max_wait_s=wait_s)

    def decide(self, state: TriggerState, *, now: float) -> TriggerDecision:
        ready, limits = state.num_ready, self.thresholds(state)
        room = self.groups_per_step - (0 if self.use == "step" else state.num_accumulated)
        if state.num_accumulated and (self.use == "step" or not room):
            reason = f"{state.num_accumulated} groups are accumulated, and their step is due"
            return TriggerDecision(num_groups=0, step=True, reason=reason)
        wanted, take = min(limits.min_groups, room), min(ready, room)
        if ready >= wanted:
            return self._fire(take, room, f"count: {ready} groups ready, {wanted} wanted")
        if state.waiting_since is None:
            return TriggerDecision(num_groups=0, step=False, reason=f"nothing ready, {wanted} groups wanted")
        expires_at = state.waiting_since + limits.max_wait_s
        if now >= expires_at:
            waited = f"{ready} groups ready for {now - state.waiting_since:.3f} s of {limits.max_wait_s:g} s"
            return self._fire(take, room, f"timeout: {waited}, {wanted} wanted")
        return TriggerDecision(
            num_groups=0, step=False, reason=f"{ready} of {wanted} groups ready", look_again_at=expires_at
        )

    def _fire(self, take: int, room: int, reason: str) -> TriggerDecision:
        return TriggerDecision(num_groups=take, step=self.use == "step" or take == room, reason=reason)
