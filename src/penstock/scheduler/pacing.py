"""How many new groups may start now, so that no more is in flight than the staleness bound can train in steps of N_min.

It paces; it never drops. The sweep and the token mask are the guarantee; pacing only saves the compute of work that
would be swept. A filtered or failed group leaves flight and is replaced, so that no mode waits for a batch that cannot
fill: with nothing playing, less than a batch ready and nothing unserved, something may start.

A trigger of use `step` that T_max lets fire below N_min makes versions faster than pacing reckons with: then the sweep
discards, and the scheduler raises an alarm that says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from penstock.config import Config
from penstock.config.scheduling import Mode, SchedulerConfig


class PacingState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of groups."""

    num_in_flight: int
    """Between their start and the moment the weights they trained are served; the unserved included."""
    num_playing: int
    """Started, and not yet ready, filtered or failed; cut ones that wait for their next grant included."""
    num_ready: int
    num_unserved: int
    """In training, or trained into weights that no server serves yet."""
    num_leftovers: int
    """Left over by a round that does not resume them, waiting to start again. Not in flight."""
    playing_leftovers: bool = False
    """Some of those playing are leftovers of an earlier round."""


class PacingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """`num_groups` may start now."""

    num_groups: int
    leftovers_only: bool
    """Take them from the leftovers, not from the data."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PacingPolicy:
    """One rule per mode.

    `asynchronous`: at most (max_staleness + 1) * B groups in flight, B being `groups_per_step`. This is AReaL's
    capacity (eta + v + 1) * B - (accepted + running) (`areal/infra/staleness_manager.py`) with accepted = v * B + the
    groups that wait for training, written without the version: a group is in flight from its start until the weights it
    trained are served, or until it is filtered, failed or discarded. Nothing to reset after a resume, and versions
    skipped by a rewind cannot open a burst.

    `one_step_off`: rounds of B, the next one when the last has been played and the one before it is served. What is in
    flight is whole rounds but for the groups a round has lost, and those are replaced.

    `synchronous`, `colocated`: rounds of B * over_sampling, none while a batch is whole or its weights are unserved.
    With leftovers `restart`, a whole batch of leftovers makes a round of its own, without over-sampling, so that long
    answers are not cut off again by short ones (RollPacker, arXiv 2509.21009).

    All but `asynchronous` rely on a learner that takes whole batches of B.
    """

    mode: Mode
    max_staleness: int
    over_sampling: float
    leftovers: Literal["resume", "restart"]
    groups_per_step: int

    @classmethod
    def from_config(cls, config: SchedulerConfig, groups_per_step: int) -> PacingPolicy:
        return cls(
            mode=config.mode,
            max_staleness=config.max_staleness,
            over_sampling=config.over_sampling,
            leftovers=config.leftovers,
            groups_per_step=groups_per_step,
        )

    def decide(self, state: PacingState, *, groups_per_step: int | None = None) -> PacingDecision:
        """`groups_per_step` stands in for the configured one where the step's size varies."""
        batch = groups_per_step or self.groups_per_step
        match self.mode:
            case "asynchronous":
                capacity = (self.max_staleness + 1) * batch
                reason = f"{state.num_in_flight} of {capacity} groups in flight"
                return _start(capacity - state.num_in_flight, reason)
            case "one_step_off":
                return self._one_step_off(state, batch)
            case "synchronous" | "colocated":
                return self._alternating(state, batch)

    def _one_step_off(self, state: PacingState, batch: int) -> PacingDecision:
        flying = state.num_in_flight
        counts = f"{flying} groups in flight, {state.num_playing} of them playing, rounds of {batch}"
        if flying >= 2 * batch:
            return _start(0, f"the round before is not served yet: {counts}")
        if lost := -flying % batch:
            return _start(lost, f"the round lacks {lost}: {counts}")
        if state.num_playing:
            return _start(0, f"a round is being played: {counts}")
        return _start(batch, f"a new round: {counts}")

    def _alternating(self, state: PacingState, batch: int) -> PacingDecision:
        if state.num_unserved:
            return _start(0, f"the weights of {state.num_unserved} groups are not served yet")
        if state.num_ready >= batch:
            return _start(0, f"the batch is whole: {state.num_ready} of {batch} groups ready")
        if self.leftovers == "restart" and (state.playing_leftovers or state.num_leftovers >= batch):
            return self._round_of_leftovers(state, batch)
        size = math.ceil(self.over_sampling * batch - 1e-9)  # 1.1 * 10 is 11, not 11.000000000000002
        started = state.num_playing + state.num_ready
        return _start(size - started, f"{started} of {size} groups of the round started, {state.num_ready} ready")

    def _round_of_leftovers(self, state: PacingState, batch: int) -> PacingDecision:
        started = state.num_playing + state.num_ready
        reason = f"a round of leftovers: {started} of {batch} started, {state.num_leftovers} wait"
        if not state.num_leftovers:
            return _start(batch - started, f"{reason}; others take the place of those lost")
        return _start(min(batch - started, state.num_leftovers), reason, leftovers_only=True)


class Unpaced:
    """Where nothing is trained nothing grows old: slots and workers are the only bounds."""

    def decide(self, state: PacingState, *, groups_per_step: int | None = None) -> PacingDecision:
        return _start(1, f"nothing is trained: {state.num_playing} groups playing")


def pacing(config: Config) -> PacingPolicy | Unpaced:
    """What the run needs."""
    if not config.has_trainer:
        return Unpaced()
    return PacingPolicy.from_config(config.scheduler, config.trainer.groups_per_step)


def _start(room: int, reason: str, *, leftovers_only: bool = False) -> PacingDecision:
    return PacingDecision(num_groups=max(room, 0), leftovers_only=leftovers_only, reason=reason)
