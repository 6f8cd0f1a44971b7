"""The trigger: when the learner gets groups, and how many.

The trigger fires at N_min ready samples (in complete groups), or when the learner has waited T_max with at least one
group ready. It has three uses:

* `compute` accumulates gradients as groups arrive, and steps at a fixed batch of `groups_per_step` groups;
* `step` makes every firing an optimizer step (the literal form of the design note);
* `batch` waits for `groups_per_step` ready groups and has no T_max (the fixed-batch baseline).

An N_min that is not typed follows from the learner's timings. It has lower bounds: every rank of the learner needs some
samples; and with `step`, at most `max_staleness` versions may follow each other while one answer is generated. By
Little's law, the groups in flight divided by `max_staleness` are the fewest groups of a step that keep to it.

Feedback scales N_min and T_max within hard bounds. Without feedback they are the configured or measured values.
"""

from __future__ import annotations

import math

import msgspec

from penstock.config.scheduling import TriggerConfig
from penstock.config.waits import wait_time

SAMPLES_PER_RANK = 4
"""With fewer samples, ranks cannot be given about equal work."""


class TriggerState(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the trigger."""

    num_ready: int
    """Complete groups, ready to train."""
    num_accumulated: int
    """Groups already accumulated towards the next step."""
    waiting_since: float | None
    """Time since which the learner has waited with a group ready; None if it works or no group is ready."""
    best_groups: int | None = None
    """Groups per call at which the learner is nearly as fast as it can be; None while this is not known."""
    whole_step_s: float | None = None
    """Seconds in which the run makes a whole step's groups; None while this is not measured."""
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
    """Fires at N_min ready groups, or when the learner has waited T_max."""

    def __init__(
        self,
        config: TriggerConfig,
        *,
        group_size: int,
        groups_per_step: int,
        fewest_per_version: int = 1,
        num_ranks: int = 1,
    ) -> None:
        """`fewest_per_version`: groups of a step below which versions outrun the staleness bound. `num_ranks`: ranks of
        the learner, which share the samples."""
        whole = group_size * groups_per_step
        self.use, self.min_samples, self._max_wait = config.use, config.samples_of(whole), wait_time(config.wait)
        self._is_typed = config.min_samples is not None
        self._group_size, self.groups_per_step = group_size, groups_per_step
        self._feedback = config.feedback
        self._wait_bounds = wait_time(config.feedback.shortest_wait), wait_time(config.feedback.longest_wait)
        self._most_samples = min(config.feedback.most_samples or whole, whole)
        self.fewest_groups = min(fewest_per_version, groups_per_step) if self.use == "step" else 1
        """Fewest groups of a step, if `min_samples` is not typed."""
        self._fewest_of_ranks = math.ceil(num_ranks * SAMPLES_PER_RANK / group_size) if num_ranks > 1 else 1

    def thresholds(self, state: TriggerState) -> Thresholds:
        """Return N_min and T_max times the factor of `state`.

        N_min is clamped in samples, then rounded up to complete groups.
        """
        if self.use == "batch":
            return Thresholds(min_groups=self.groups_per_step, max_wait_s=math.inf)
        samples, feedback = self._base_samples(state), self._feedback
        step_s = math.inf if state.whole_step_s is None else state.whole_step_s
        wait_s = self._max_wait.seconds(step_s)
        if feedback.signal != "none":
            samples = min(max(samples * state.factor, feedback.fewest_samples), self._most_samples)
            shortest, longest = (each.seconds(step_s) for each in self._wait_bounds)
            wait_s = min(max(wait_s * state.factor, min(shortest, longest)), longest)
        # floating point: a product of 33.000000000000004 samples means 33
        min_groups = max(math.ceil(samples / self._group_size - 1e-9), 1)
        if not self._is_typed:
            min_groups = min(max(min_groups, self.fewest_groups, self._fewest_of_ranks), self.groups_per_step)
        return Thresholds(min_groups=min_groups, max_wait_s=wait_s)

    def _base_samples(self, state: TriggerState) -> float:
        """Return N_min before feedback. The noise scale is itself a number of samples, and needs a fixed base."""
        if self._is_typed or state.best_groups is None or self._feedback.signal == "noise_scale":
            return float(self.min_samples)
        return float(min(state.best_groups, self.groups_per_step) * self._group_size)

    def decide(self, state: TriggerState, *, now: float) -> TriggerDecision:
        ready, limits = state.num_ready, self.thresholds(state)
        room = self.groups_per_step - (0 if self.use == "step" else state.num_accumulated)
        if state.num_accumulated and (self.use == "step" or not room):
            reason = f"{state.num_accumulated} groups are accumulated, and their step is due"
            return TriggerDecision(num_groups=0, step=True, reason=reason)
        wanted, take = min(limits.min_groups, room), min(ready, room)
        if ready >= wanted:
            return self._fire(take, room, f"count: {ready} groups ready, {wanted} wanted")
        if state.waiting_since is None or not ready:
            return TriggerDecision(num_groups=0, step=False, reason=f"nothing ready, {wanted} groups wanted")
        expires_at = state.waiting_since + limits.max_wait_s
        if now >= expires_at:
            waited = f"the learner has waited {now - state.waiting_since:.3f} s of {limits.max_wait_s:.4g} s"
            return self._fire(take, room, f"timeout: {waited}, {ready} groups ready, {wanted} wanted")
        reason = f"{ready} of {wanted} groups ready"
        return TriggerDecision(num_groups=0, step=False, reason=reason, look_again_at=expires_at)

    def _fire(self, take: int, room: int, reason: str) -> TriggerDecision:
        return TriggerDecision(num_groups=take, step=self.use == "step" or take == room, reason=reason)
