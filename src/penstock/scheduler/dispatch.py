"""Dispatch policies: the order in which waiting groups start. Pure: `now` is passed in.

Three rules hold under every policy. The oldest group goes next once it has waited `max_wait`. Only the `look_ahead`
oldest groups compete. A policy never skips a group because a smaller group would fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import msgspec

from penstock.config import DispatchConfig
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.order import Order, Waiting

Part = Literal["whole", "probe", "rest"]

SIGNS = {"fifo": 0, "sjf": 1, "ljf": -1, "probe": 0}


class DispatchDecision(msgspec.Struct, frozen=True, kw_only=True):
    """`part` of `group` runs next: all members, the first one, or all but the first."""

    group: ActiveGroup
    part: Part
    reason: str


class DispatchPolicy:
    """The waiting groups, in the order of `scheduler.dispatch.policy`.

    `fifo`, `sjf` and `ljf` start all members of a group at once. `probe` starts one member of each group first, then
    its other members (Seer, arXiv 2511.14617): the first member is the probe, the other members are the rest. Probes
    start oldest group first; rests start longest probe first. Probes go before rests, except before a rest that has
    waited `max_wait`.
    """

    def __init__(self, config: DispatchConfig, *, look_ahead: int) -> None:
        self._name: str = config.policy
        order = partial(Order[ActiveGroup], aging=config.aging, max_wait=config.max_wait, look_ahead=look_ahead)
        self._starts = order(sign=SIGNS[config.policy])
        self._rests = order(sign=-1)
        self._trusted = True

    def push(self, group: ActiveGroup) -> None:
        """Add a group. Its waiting time starts at its `admitted_at`."""
        self._starts.push(group, number=group.number, since=group.admitted_at, tokens=group.predicted_tokens)

    def push_rest(self, group: ActiveGroup, probe_tokens: int, *, now: float) -> None:
        """Add the members of `group` other than its probe. The probe took `probe_tokens`."""
        self._rests.push(group, number=group.number, since=now, tokens=probe_tokens)

    def pop(self, *, now: float, free: int, may_start: bool) -> DispatchDecision | None:
        """Remove and return the next decision.

        Returns None if no group waits, or if the next group needs more than `free` grants. Also returns None if the
        decision would start a new group while `may_start` is false.
        """
        start = self._starts.next(now) if may_start else None
        rest = self._rests.next(now) if len(self._rests) else None
        if rest is not None and (start is None or rest[1]):
            return self._take(self._rests, rest, "rest", now, free)
        if start is None:
            return None
        part: Part = "probe" if self._name == "probe" and start[0].item.size > 1 else "whole"
        return self._take(self._starts, start, part, now, free)

    def _take(
        self, order: Order[ActiveGroup], following: tuple[Waiting[ActiveGroup], bool], part: Part, now: float, free: int
    ) -> DispatchDecision | None:
        waiting, is_overdue = following
        group = waiting.item
        if free < (group.size if part == "whole" else 1 if part == "probe" else group.size - 1):
            return None
        order.take(waiting, now)
        name = f"probe ({part})" if self._name == "probe" else self._name
        source = "in the probe" if part == "rest" else "predicted"
        reason = f"{name}: waited {now - waiting.since:.3f} s, {waiting.tokens:.0f} tokens {source}"
        if is_overdue:
            reason += "; the oldest, and past max_wait"
        elif not self._trusted and (part == "rest" or self._name != "probe"):
            reason += ", not trusted: first come, first served"
        return DispatchDecision(group=group, part=part, reason=reason)

    def change(self, config: DispatchConfig, *, look_ahead: int) -> None:
        """Order the waiting groups by another policy, or choose from another number of groups."""
        self._name = config.policy
        self._starts.change(sign=SIGNS[config.policy], look_ahead=look_ahead)
        self._rests.change(sign=-1, look_ahead=look_ahead)

    def adapt(self, *, preference: float, trusted: bool) -> None:
        """Let `sjf` multiply predicted lengths by `preference`. While lengths are not `trusted`, order by age."""
        self._trusted = trusted
        self._starts.adapt((preference if self._name == "sjf" else 1.0) if trusted else 0.0)
        self._rests.adapt(1.0 if trusted else 0.0)

    def pending(self) -> list[ActiveGroup]:
        """Return the groups that have not started."""
        return [waiting.item for waiting in self._starts.waiting()]

    def revise(self, predicted_tokens: Mapping[int, float]) -> None:
        """Replace the predictions of pending groups; `predicted_tokens` is by group number."""
        self._starts.revise(predicted_tokens)

    @property
    def max_wait_s(self) -> float:
        """Return the wait after which the oldest group starts next; infinite before the first waits are known."""
        return self._starts.max_wait_s

    def oldest_wait_s(self, now: float) -> float:
        """Return how long the oldest waiting group has waited."""
        oldest = (self._starts.oldest(), self._rests.oldest())
        return max([0.0, *(now - waiting.since for waiting in oldest if waiting is not None)])

    def __len__(self) -> int:
        return len(self._starts) + len(self._rests)
