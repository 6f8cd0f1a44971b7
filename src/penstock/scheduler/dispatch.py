"""What runs next. A dispatch policy orders whole groups; it never looks at a clock, `now` is passed in.

Whatever the policy: the oldest group goes next once it has waited `max_wait_s`; only the `look_ahead` oldest groups
compete; and a group is never passed over because a smaller one would fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

from penstock.config import DispatchConfig
from penstock.scheduler.order import Order, Waiting
from penstock.types import Task

Part = Literal["whole", "probe", "rest"]

SIGNS = {"fifo": 0, "sjf": 1, "ljf": -1}


class PendingGroup(msgspec.Struct, frozen=True, kw_only=True):
    """An admitted group nobody plays yet."""

    group: int
    task: Task
    size: int
    admitted_at: float
    predicted_tokens: float = 0.0
    """Mean response tokens per episode."""


class DispatchDecision(msgspec.Struct, frozen=True, kw_only=True):
    """`part` of `group` runs next: all members, the first one, or all but the first."""

    group: PendingGroup
    part: Part
    reason: str


class DispatchPolicy(Protocol):
    """Holds the pending groups in its own order."""

    def push(self, group: PendingGroup) -> None:
        """`group` waits, since its `admitted_at`."""
        ...

    def push_rest(self, group: PendingGroup, probe_tokens: int) -> None:
        """The probe of `group` took `probe_tokens`; the other members may run."""
        ...

    def pop(self, *, now: float, free: int, may_start: bool) -> DispatchDecision | None:
        """Take out what runs next. None if nothing is pending, if what is next needs more than `free` episode slots,
        or if it would start a new group although not `may_start`."""
        ...

    def adapt(self, *, preference: float, trusted: bool) -> None:
        """Let `sjf` count predicted lengths `preference` times; come first, go first while they are not `trusted`."""
        ...

    def pending(self) -> list[PendingGroup]:
        """Those whose order follows from predicted lengths."""
        ...

    def revise(self, predicted_tokens: Mapping[int, float]) -> None:
        """Better predictions for pending groups, by group."""
        ...

    def oldest_wait_s(self, now: float) -> float:
        """How long the oldest pending group has waited."""
        ...

    def __len__(self) -> int: ...


class WholeGroups:
    """`fifo`, `sjf`, `ljf`: all members of a group at once."""

    def __init__(self, config: DispatchConfig, *, look_ahead: int) -> None:
        self._policy: str = config.policy
        self._order = _order(config, SIGNS[config.policy], look_ahead)
        self._trusted = True

    def push(self, group: PendingGroup) -> None:
        self._order.push(group, number=group.group, since=group.admitted_at, tokens=group.predicted_tokens)

    def push_rest(self, group: PendingGroup, probe_tokens: int) -> None:
        raise ValueError(f"{self._policy} gives out whole groups: group {group.group} has no rest")

    def pop(self, *, now: float, free: int, may_start: bool) -> DispatchDecision | None:
        following = self._order.next(now) if may_start else None
        if following is None or following[0].item.size > free:
            return None
        waiting, forced = following
        self._order.take(waiting)
        reason = _reason(self._policy, waiting, now, forced, "predicted", self._trusted)
        return DispatchDecision(group=waiting.item, part="whole", reason=reason)

    def adapt(self, *, preference: float, trusted: bool) -> None:
        self._trusted = trusted
        self._order.adapt(0.0 if not trusted else preference if self._policy == "sjf" else 1.0)

    def pending(self) -> list[PendingGroup]:
        return [waiting.item for waiting in self._order.waiting()]

    def revise(self, predicted_tokens: Mapping[int, float]) -> None:
        self._order.revise(predicted_tokens)

    def oldest_wait_s(self, now: float) -> float:
        return _wait_s(self._order, now)

    def __len__(self) -> int:
        return len(self._order)


class Probe:
    """One member of each group, oldest group first; then the others, longest probe first (Seer, arXiv 2511.14617).

    Probes go before rests, except before a rest that has waited `max_wait_s`. A rest waits since the last `now` this
    policy saw before `push_rest`, or since its `admitted_at` if that is later. What is trusted, or not, is the probe.
    """

    def __init__(self, config: DispatchConfig, *, look_ahead: int) -> None:
        self._probes = _order(config, 0, look_ahead)
        self._rests = _order(config, -1, look_ahead)
        self._seen = float("-inf")
        self._trusted = True

    def push(self, group: PendingGroup) -> None:
        self._probes.push(group, number=group.group, since=group.admitted_at, tokens=group.predicted_tokens)

    def push_rest(self, group: PendingGroup, probe_tokens: int) -> None:
        since = max(self._seen, group.admitted_at)
        self._rests.push(group, number=group.group, since=since, tokens=probe_tokens)

    def pop(self, *, now: float, free: int, may_start: bool) -> DispatchDecision | None:
        self._seen = max(self._seen, now)
        probe = self._probes.next(now) if may_start else None
        rest = self._rests.next(now)
        if rest is not None and (probe is None or rest[1]):
            return self._pop_rest(*rest, now, free)
        return self._pop_probe(*probe, now, free) if probe is not None else None

    def adapt(self, *, preference: float, trusted: bool) -> None:
        self._trusted = trusted
        self._rests.adapt(1.0 if trusted else 0.0)

    def pending(self) -> list[PendingGroup]:
        return []

    def revise(self, predicted_tokens: Mapping[int, float]) -> None:
        """What a probe showed is not predicted."""

    def oldest_wait_s(self, now: float) -> float:
        self._seen = max(self._seen, now)
        return max(_wait_s(self._probes, now), _wait_s(self._rests, now))

    def __len__(self) -> int:
        return len(self._probes) + len(self._rests)

    def _pop_probe(
        self, waiting: Waiting[PendingGroup], forced: bool, now: float, free: int
    ) -> DispatchDecision | None:
        if free < 1:
            return None
        self._probes.take(waiting)
        part: Part = "probe" if waiting.item.size > 1 else "whole"
        reason = _reason(f"probe ({part})", waiting, now, forced, "predicted", True)
        return DispatchDecision(group=waiting.item, part=part, reason=reason)

    def _pop_rest(self, waiting: Waiting[PendingGroup], forced: bool, now: float, free: int) -> DispatchDecision | None:
        if free < waiting.item.size - 1:
            return None
        self._rests.take(waiting)
        reason = _reason("probe (rest)", waiting, now, forced, "in the probe", self._trusted)
        return DispatchDecision(group=waiting.item, part="rest", reason=reason)


def dispatch_policy(config: DispatchConfig, *, look_ahead: int) -> DispatchPolicy:
    """The policy of `scheduler.dispatch`."""
    return (Probe if config.policy == "probe" else WholeGroups)(config, look_ahead=look_ahead)


def _order(config: DispatchConfig, sign: int, look_ahead: int) -> Order[PendingGroup]:
    return Order(sign=sign, aging_s=config.aging_s, max_wait_s=config.max_wait_s, look_ahead=look_ahead)


def _wait_s(order: Order[PendingGroup], now: float) -> float:
    oldest = order.oldest()
    return max(0.0, now - oldest.since) if oldest is not None else 0.0


def _reason(policy: str, waiting: Waiting[PendingGroup], now: float, forced: bool, source: str, trusted: bool) -> str:
    inputs = f"{policy}: waited {now - waiting.since:.3f} s, {waiting.tokens:.0f} tokens {source}"
    if forced:
        return f"{inputs}; the oldest, and past max_wait_s"
    return inputs if trusted else f"{inputs}, not trusted: first come, first served"
