"""The trigger: when the learner gets groups, and how many.

The trigger fires at N_min ready samples (in complete groups), or when the oldest ready group has waited T_max. It has
three uses:

* `compute` accumulates gradients as groups arrive, and steps at a fixed batch of `groups_per_step` groups;
* `step` makes every firing an optimizer step (the literal form of the design note);
* `batch` waits for `groups_per_step` ready groups and has no T_max (the fixed-batch baseline).

Feedback scales N_min and T_max within hard bounds. Without feedback they are the configured values.
"""

from __future__ import annotations

import math

import msgspec

from penstock.config.scheduling import TriggerConfig


class TriggerState(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the trigger."""

    num_ready: int
    """Complete groups, ready to train."""
    num_accumulated: int
    """Groups already accumulated towards the next step."""
    waiting_since: float | None
    """Time at which the oldest ready group became ready; None if there is no such group."""
    factor: float = 1.0
    """Feedback multiplies N_min and T_max by it."""


class TriggerDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Train `num_groups` now, then take an optimizer step if `step`.

    Without either, decide again at the time `look_again_at` or on an event.
    """

    num_groups: int
    step: bool
    reason: str
    look_again_at: float = math.inf


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """N_min in groups, and T_max in seconds (infinite if only N_min fires)."""

    min_groups: int
    max_wait_s: float


class Trigger:
    """Fires at N_min ready groups, or when the oldest one has waited T_max."""

    def __init__(self, config: TriggerConfig, *, group_size: int, groups_per_step: int) -> None:
        whole = group_size * groups_per_step
        self.use, self.min_samples, self._max_wait_s = config.use, config.samples_of(whole), config.max_wait_s
        self._group_size, self.groups_per_step = group_size, groups_per_step
        self._feedback = config.feedback
        self._most_samples = min(config.feedback.most_samples or whole, whole)

    def thresholds(self, state: TriggerState) -> Thresholds:
        """Return N_min and T_max times the factor of `state`.

        N_min is clamped in samples, then rounded up to complete groups.
        """
        if self.use == "batch":
            return Thresholds(min_groups=self.groups_per_step, max_wait_s=math.inf)
        samples, wait_s, feedback = float(self.min_samples), self._max_wait_s, self._feedback
        if feedback.signal != "none":
            samples = min(max(samples * state.factor, feedback.fewest_samples), self._most_samples)
            wait_s = min(max(wait_s * state.factor, feedback.shortest_wait_s), feedback.longest_wait_s)
        # floating point: a product of 33.000000000000004 samples means 33
        min_groups = max(math.ceil(samples / self._group_size - 1e-9), 1)
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
        reason = f"{ready} of {wanted} groups ready"
        return TriggerDecision(num_groups=0, step=False, reason=reason, look_again_at=expires_at)

    def _fire(self, take: int, room: int, reason: str) -> TriggerDecision:
        return TriggerDecision(num_groups=take, step=self.use == "step" or take == room, reason=reason)
