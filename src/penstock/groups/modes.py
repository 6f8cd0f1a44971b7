"""The predefined modes of a call. Each sets one intent for all arguments, one way to collect, and one set of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from penstock.groups.collect import Collect, concat, each, first
from penstock.groups.intent import Broadcast, BroadcastFunction, Intent, PerRank, Shard
from penstock.groups.mesh import Over

SplitArguments = Callable[[Mapping[str, Any], int], Sequence[Mapping[str, Any]]]
"""(arguments by name, n) -> arguments by name for each of n parts. A ValueError refuses the call."""


class Execute(Enum):
    """Where a call runs."""

    ALL = auto()
    """On every rank."""
    RANK_ZERO = auto()
    """Only on rank zero; its result is returned as it is."""


@dataclass(frozen=True, slots=True, eq=False)  # modes with equal plans are different modes
class Plan:
    """The settings of a mode."""

    intent: Intent | None
    """Intent of all arguments; None leaves it to the call."""
    collect: Collect
    over: Over = "ranks"
    first_intent: Intent | None = None
    """Intent of the first argument, if it differs from `intent`."""

    def intents(self, arguments: Sequence[str]) -> dict[str, Intent]:
        """Return the intents by argument."""
        intents: dict[str, Intent | None] = dict.fromkeys(arguments, self.intent)
        if self.first_intent is not None:
            intents[arguments[0]] = self.first_intent
        return {name: intent for name, intent in intents.items() if intent is not None}


class Mode(Enum):
    """A predefined way to dispatch and collect."""

    ONE_TO_ALL = Plan(Broadcast(), each)
    """Every rank gets every argument whole. Results are a list by rank."""
    ALL_TO_ALL = Plan(None, each)
    """The call chooses for every argument (`Broadcast(x)`, `Shard(x)`, `PerRank([...])`); the default is whole. Results
    are a list by rank."""
    MEGATRON_COMPUTE = Plan(PerRank(), each, "dp")
    """Each data-parallel rank gets one element of every list. Results are a list by data-parallel rank."""
    MEGATRON_PP_AS_DP = Plan(PerRank(), each, "dp_pp")
    """As `MEGATRON_COMPUTE`, but every pipeline stage counts as a data-parallel rank of its own."""
    MEGATRON_PP_ONLY = Plan(Broadcast(), each, "pp")
    """Every rank gets every argument whole. Results are a list by pipeline stage."""
    MEGATRON_COMPUTE_PROTO = Plan(Shard(), concat, "dp")
    """Batches are cut over data-parallel ranks, and results are joined."""
    MEGATRON_PP_AS_DP_PROTO = Plan(Shard(), concat, "dp_pp")
    """As `MEGATRON_COMPUTE_PROTO`, but every pipeline stage counts as a data-parallel rank of its own."""
    DP_COMPUTE = Plan(PerRank(), each)
    """Each rank gets one element of every list. Results are a list by rank."""
    DP_COMPUTE_PROTO = Plan(Shard(), concat)
    """Batches are cut over ranks, and results are joined."""
    DP_COMPUTE_PROTO_WITH_FUNC = Plan(Shard(), concat, first_intent=BroadcastFunction())
    """As `DP_COMPUTE_PROTO`, but the first argument is a function, which every rank gets."""
    DP_COMPUTE_METRIC = Plan(Shard(), each)
    """Batches are cut over ranks. Results are a list by rank."""
    DIRECT_ROLLOUT_METHOD = Plan(Broadcast(), first)
    """The method is called on one worker of the group, through `group.on(rank)`."""


@dataclass(frozen=True, slots=True)
class Custom:
    """A user-defined way to dispatch and collect."""

    split: SplitArguments
    collect: Collect
    over: Over = "ranks"
