"""Pacing: how many new groups may start now.

Pacing bounds the groups in flight to those that the trainer can use, in steps of N_min, within the staleness bound. It
never drops groups. The sweep (`supply.py`) and the learner's token mask guarantee the bound. Pacing only saves the
compute for work that the sweep would drop.

A filtered or failed group is no longer in flight, and another group replaces it. So no mode waits for a batch that
cannot fill: a group may start if no group is playing, less than a batch is ready, and no group is unserved.

`asynchronous`: at most (max_staleness + 1) * B groups are in flight, where B is the number of groups of a step. A group
is in flight from its start until the weights that it trained are served, or until it is filtered, failed or discarded.
This equals AReaL's capacity (eta + v + 1) * B - (accepted + running) (`areal/infra/staleness_manager.py`), with
accepted = v * B + the groups that wait for training. It does not need the version v. So there is nothing to reset
after a resume, and versions that a rewind skips cannot start a burst of groups.

`one_step_off`: groups start in rounds of B. A round starts when no group is playing and the round before the last one
is served. Groups in flight are full rounds; new groups replace groups that a round has lost.

`synchronous`, `colocated`: groups start in rounds of B * over_sampling. No group starts while a batch is complete or
its weights are unserved. With leftovers `restart`, a full batch of leftovers makes its own round, without
over-sampling. So short answers do not cut off long answers again (RollPacker, arXiv 2509.21009).

All modes except `asynchronous` rely on a learner that takes full batches of B groups.

With `trigger.use` set to `step`, T_max can make the trigger fire below N_min. Policy versions then grow faster than
pacing assumes. The sweep discards stale groups, and the scheduler raises an alarm about them.
"""

from __future__ import annotations

import math

import msgspec

from penstock.config.scheduling import SchedulerConfig


class PacingState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of groups."""

    groups_per_step: int
    """Least number of groups in the next optimizer step."""
    num_playing: int
    """Groups that have started, and are not ready, filtered or failed yet. Includes groups with episodes that wait for
    their next grant."""
    num_ready: int
    num_unserved: int
    """Groups in training, or trained into weights that no server serves yet."""
    num_leftovers: int
    """Leftovers of an earlier round that wait to restart. They are not in flight."""
    playing_leftovers: bool = False
    """Whether some of the playing groups are leftovers of an earlier round."""

    @property
    def num_in_flight(self) -> int:
        """Return the number of groups between their start and the moment when servers have the weights that they
        trained."""
        return self.num_playing + self.num_ready + self.num_unserved


class PacingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """`num_groups` may start now."""

    num_groups: int
    leftovers_only: bool
    """Start leftovers instead of new groups."""
    reason: str


def pace(config: SchedulerConfig | None, state: PacingState) -> PacingDecision:
    """Return how many groups may start.

    `config` is None in a run without a trainer. No group becomes stale there, so only slots and workers bound it.
    """
    if config is None:
        return _start(1, f"nothing is trained: {state.num_playing} groups playing")
    match config.mode:
        case "asynchronous":
            capacity = (config.max_staleness + 1) * state.groups_per_step
            return _start(capacity - state.num_in_flight, f"{state.num_in_flight} of {capacity} groups in flight")
        case "one_step_off":
            return _one_step_off(state)
        case "synchronous" | "colocated":
            return _alternating(config, state)


def _one_step_off(state: PacingState) -> PacingDecision:
    flying, batch = state.num_in_flight, state.groups_per_step
    counts = f"{flying} groups in flight, {state.num_playing} of them playing, rounds of {batch}"
    if flying >= 2 * batch:
        return _start(0, f"the round before is not served yet: {counts}")
    if lost := -flying % batch:
        return _start(lost, f"the round lacks {lost}: {counts}")
    if state.num_playing:
        return _start(0, f"a round is being played: {counts}")
    return _start(batch, f"a new round: {counts}")


def _alternating(config: SchedulerConfig, state: PacingState) -> PacingDecision:
    batch = state.groups_per_step
    if state.num_unserved:
        return _start(0, f"the weights of {state.num_unserved} groups are not served yet")
    if state.num_ready >= batch:
        return _start(0, f"the batch is whole: {state.num_ready} of {batch} groups ready")
    if config.leftovers == "restart" and (state.playing_leftovers or state.num_leftovers >= batch):
        return _round_of_leftovers(state)
    size = math.ceil(config.over_sampling * batch - 1e-9)  # 1.1 * 10 is 11, not 11.000000000000002
    started = state.num_playing + state.num_ready
    return _start(size - started, f"{started} of {size} groups of the round started, {state.num_ready} ready")


def _round_of_leftovers(state: PacingState) -> PacingDecision:
    started, batch = state.num_playing + state.num_ready, state.groups_per_step
    reason = f"a round of leftovers: {started} of {batch} started, {state.num_leftovers} wait"
    if not state.num_leftovers:
        return _start(batch - started, f"{reason}; new groups replace lost leftovers")
    return _start(min(batch - started, state.num_leftovers), reason, leftovers_only=True)


def _start(room: int, reason: str, *, leftovers_only: bool = False) -> PacingDecision:
    return PacingDecision(num_groups=max(room, 0), leftovers_only=leftovers_only, reason=reason)
