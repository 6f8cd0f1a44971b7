"""The predefined ways to dispatch a call: one intent for all arguments, one way to collect, over one set of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from penstock.groups.collect import Collect, concat, each, first
from penstock.groups.intent import Broadcast, BroadcastFunction, Intent, PerRank, Shard
from penstock.groups.mesh import Over


class Execute(Enum):
    """Where a call runs."""

    ALL = auto()
    """On every rank."""
    RANK_ZERO = auto()
    """On rank zero alone, whose result is returned as it is."""


class Mode(Enum):
    """See `PLANS`."""

    ONE_TO_ALL = auto()
    """Every argument whole to every rank; results by rank."""
    ALL_TO_ALL = auto()
    """Every argument as the call says (`Broadcast(x)`, `Shard(x)`, `PerRank([...])`), whole if it does not; results by
    rank."""
    MEGATRON_COMPUTE = auto()
    """A list element per data-parallel rank; a list of results by data-parallel rank."""
    MEGATRON_PP_AS_DP = auto()
    """As above, with every pipeline stage a data-parallel rank of its own."""
    MEGATRON_PP_ONLY = auto()
    """Every argument whole to every rank; results by pipeline stage."""
    MEGATRON_COMPUTE_PROTO = auto()
    """Batches cut over data-parallel ranks, results joined."""
    MEGATRON_PP_AS_DP_PROTO = auto()
    """As above, with every pipeline stage a data-parallel rank of its own."""
    DP_COMPUTE = auto()
    """A list element per rank; results by rank."""
    DP_COMPUTE_PROTO = auto()
    """Batches cut over ranks, results joined."""
    DP_COMPUTE_PROTO_WITH_FUNC = auto()
    """As above, with a function as the first argument, whole to every rank."""
    DP_COMPUTE_METRIC = auto()
    """Batches cut over ranks; results by rank."""
    DIRECT_ROLLOUT_METHOD = auto()
    """Not called through the group at all, but on one of its workers: `group.on(rank)`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a mode does."""

    intent: Intent | None
    """Of all arguments; None leaves it to the call."""
    collect: Collect
    over: Over = "ranks"
    first_intent: Intent | None = None
    """Of the first argument, if it is another one."""

    def intents(self, arguments: Sequence[str]) -> dict[str, Intent]:
        """By argument."""
        intents: dict[str, Intent | None] = dict.fromkeys(arguments, self.intent)
        if self.first_intent is not None:
            intents[arguments[0]] = self.first_intent
        return {name: intent for name, intent in intents.items() if intent is not None}


PLANS: Mapping[Mode, Plan] = {
    Mode.ONE_TO_ALL: Plan(Broadcast(), each),
    Mode.ALL_TO_ALL: Plan(None, each),
    Mode.MEGATRON_COMPUTE: Plan(PerRank(), each, "dp"),
    Mode.MEGATRON_PP_AS_DP: Plan(PerRank(), each, "dp_pp"),
    Mode.MEGATRON_PP_ONLY: Plan(Broadcast(), each, "pp"),
    Mode.MEGATRON_COMPUTE_PROTO: Plan(Shard(), concat, "dp"),
    Mode.MEGATRON_PP_AS_DP_PROTO: Plan(Shard(), concat, "dp_pp"),
    Mode.DP_COMPUTE: Plan(PerRank(), each),
    Mode.DP_COMPUTE_PROTO: Plan(Shard(), concat),
    Mode.DP_COMPUTE_PROTO_WITH_FUNC: Plan(Shard(), concat, first_intent=BroadcastFunction()),
    Mode.DP_COMPUTE_METRIC: Plan(Shard(), each),
    Mode.DIRECT_ROLLOUT_METHOD: Plan(Broadcast(), first),
}


@dataclass(frozen=True, slots=True)
class Custom:
    """A way of one's own."""

    split: Callable[[Mapping[str, Any], int], Sequence[Mapping[str, Any]]]
    """(arguments by name, n) -> arguments by name for each of n parts. A ValueError refuses the call."""
    collect: Collect
    over: Over = "ranks"
