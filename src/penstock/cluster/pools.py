"""The plan that assigns the parts of pools to nodes. Pure: it takes nodes and demands, and returns a plan or a reason.

A pool asks for slots on a number of different nodes. Each node's part must fit on its node as a whole: CPUs,
accelerators, memory and labels count per node and never over the cluster. Parts of different pools may share a node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.config.cluster import GIB, ClusterConfig
from penstock.config.invalid_settings import ConfigError

Resources = Mapping[str, float]
"""Amounts by the cluster's resource names; memory in bytes."""

Bundles = Mapping[str, Sequence[Sequence[int]]]
"""Number of slots in each bundle, by pool and node."""

MAX_TRIES = 20_000
"""Most assignments of one part to one node that the search tries before it gives up."""
SHOWN_NODES = 8
EPSILON = 1e-9


class DoesNotFit(ConfigError):
    """The pools ask for more than the nodes have; the message has the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster."""

    node_id: str
    address: str
    total: Resources
    free: Resources
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The demand of a pool on one node."""

    pool: str
    index: int
    """Index among the pool's nodes, from 0."""
    bundles: tuple[int, ...]
    """Number of slots in each bundle; a bundle is for one process."""
    per_slot: Resources
    labels: Mapping[str, str]

    @property
    def num_slots(self) -> int:
        return sum(self.bundles)

    @property
    def wanted(self) -> dict[str, float]:
        """Return the resources of all its slots."""
        return self.wanted_by(self.num_slots)

    def wanted_by(self, num_slots: int) -> dict[str, float]:
        """Return the resources of `num_slots` slots."""
        return {name: amount * num_slots for name, amount in self.per_slot.items()}

    def __str__(self) -> str:
        labels = f" with {', '.join(f'{k}={v}' for k, v in self.labels.items())}" if self.labels else ""
        slots = "1 slot" if self.num_slots == 1 else f"{self.num_slots} slots"
        return f"pool {self.pool}, node {self.index + 1}: {slots}, {_amounts(self.wanted)} on one node{labels}"


@dataclass(frozen=True, slots=True)
class Placed:
    """A part, and the node that the plan assigns to it."""

    part: Part
    node: Node


def parts_of(config: ClusterConfig, bundles: Bundles | None = None) -> list[Part]:
    """Return the parts of the pools in `bundles`, in the order of the configuration. By default return all pools, with
    one slot per bundle."""
    return [
        Part(
            pool=name,
            index=index,
            bundles=tuple(bundles[name][index]) if bundles is not None else (1,) * node.slots,
            per_slot=pool.per_slot,
            labels={**pool.labels, **node.labels},
        )
        for name, pool in config.pools.items()
        if bundles is None or name in bundles
        for index, node in enumerate(pool.each_node)
    ]


def plan(parts: Sequence[Part], nodes: Sequence[Node], *, busy: bool = True) -> list[Placed]:
    """Return a node for every part, in the order of the ranks: by pool as configured, then by node address. With `busy`
    count only the free resources of a node, else all of them. Raises `DoesNotFit`."""
    ordered = sorted(nodes, key=_by_address)
    free = {node.node_id: dict(node.free if busy else node.total) for node in ordered}
    hardest = sorted(parts, key=lambda part: (-len(part.labels), -_size(part, ordered)))
    search = _Search(hardest, ordered, free)
    chosen = search.run()
    if chosen is None:
        raise DoesNotFit(_why(hardest, ordered, free, given_up=search.given_up))
    pools = list(dict.fromkeys(part.pool for part in parts))
    rank = {node.node_id: number for number, node in enumerate(ordered)}
    return sorted(chosen, key=lambda placed: (pools.index(placed.part.pool), rank[placed.node.node_id]))


def why_not_held(lacking: Sequence[Placed], nodes: Sequence[Node], *, seconds: float) -> str:
    """Return the error message for parts that Ray did not reserve within `seconds`, although a plan had found room. It
    shows what `nodes` have left."""
    present = {node.node_id: node for node in nodes}
    shown = []
    for placed in lacking:
        node = present.get(placed.node.node_id)
        left = _node_shown([placed.part], node, node.free) if node is not None else f"{placed.node.address} is gone"
        shown.append(f"{placed.part}: {left}")
    return (
        f"cluster.pools: {'; '.join(shown)}. The nodes had room at first, and then no room for {seconds:.0f} s: "
        "wait until other jobs end, or raise cluster.place_timeout_s"
    )


class _Search:
    """A depth-first search that tries the hardest part and the fullest node first."""

    def __init__(self, parts: Sequence[Part], nodes: Sequence[Node], free: Mapping[str, Resources]) -> None:
        self._parts, self._nodes = parts, nodes
        self._free = {node_id: dict(amounts) for node_id, amounts in free.items()}
        self._chosen: list[Placed] = []
        self._left = MAX_TRIES

    @property
    def given_up(self) -> bool:
        """Return whether the search ended before it tried everything."""
        return self._left <= 0

    def run(self) -> list[Placed] | None:
        """Return the plan; None if there is no plan, or if the search gave up."""
        chosen = self._chosen
        untried: list[Iterator[Node]] = []
        """Untried nodes for each chosen part and for the next one."""
        while len(chosen) < len(self._parts):
            if self.given_up:
                return None
            part = self._parts[len(chosen)]
            if len(untried) == len(chosen):
                untried.append(self._candidates(part))
            self._left -= 1
            if node := next(untried[-1], None):
                chosen.append(Placed(part, node))
                self._take(chosen[-1], 1)
            elif chosen:
                untried.pop()
                self._take(chosen.pop(), -1)
            else:
                return None
        return chosen

    def _candidates(self, part: Part) -> Iterator[Node]:
        """Return the nodes that can hold the part now, the fullest first. Of equal unused nodes return only one."""
        used = {placed.node.node_id for placed in self._chosen}
        used_by_pool = {placed.node.node_id for placed in self._chosen if placed.part.pool == part.pool}
        nodes = [node for node in self._nodes if node.node_id not in used_by_pool]
        fitting = [node for node in nodes if fits(part, self._free[node.node_id], node.labels)]
        fitting.sort(key=lambda node: sum(self._free[node.node_id].get(name, 0.0) for name in part.per_slot))
        different: dict[object, Node] = {}
        for node in fitting:
            kind = frozenset(self._free[node.node_id].items()), frozenset(node.labels.items())
            different.setdefault(node.node_id if node.node_id in used else kind, node)
        return iter(different.values())

    def _take(self, placed: Placed, sign: int) -> None:
        """Take the part's resources from the node; with sign -1 give them back."""
        free = self._free[placed.node.node_id]
        for name, amount in placed.part.wanted.items():
            free[name] = free.get(name, 0.0) - sign * amount


def fits(part: Part, free: Resources, labels: Mapping[str, str]) -> bool:
    """Return whether the part fits on a node with these free resources and labels."""
    has_labels = all(labels.get(key) == value for key, value in part.labels.items())
    return has_labels and all(free.get(name, 0.0) + EPSILON >= amount for name, amount in part.wanted.items())


def _size(part: Part, nodes: Sequence[Node]) -> float:
    """Return the size of a part: the largest share of a resource that it takes from the node with the most of it."""
    most = {name: max((node.total.get(name, 0.0) for node in nodes), default=0.0) for name in part.per_slot}
    return max((amount / most[name] if most[name] else float("inf") for name, amount in part.wanted.items()), default=0)


def _by_address(node: Node) -> tuple[list[str | int], str]:
    """Return a sort key that compares the numbers in addresses, so that 10.0.0.9 comes before 10.0.0.10."""
    words = re.split(r"(\d+)", node.address)
    return [int(word) if word.isdigit() else word for word in words], node.node_id


def _why(parts: Sequence[Part], nodes: Sequence[Node], free: Mapping[str, Resources], *, given_up: bool) -> str:
    """Return the error message. It names the parts that fit on no node; if there are none, it names all parts, which do
    not fit together."""
    too_large = [part for part in parts if not any(fits(part, free[node.node_id], node.labels) for node in nodes)]
    named = too_large or parts
    heading = "fits on no node" if too_large else "do not all fit at once, each pool on different nodes"
    if given_up and not too_large:
        heading = f"no placement was found in {MAX_TRIES} tries"
    demands = "; ".join(dict.fromkeys(map(str, named)))
    shown = [_node_shown(named, node, free[node.node_id]) for node in nodes[:SHOWN_NODES]]
    if len(nodes) > SHOWN_NODES:
        shown.append(f"and {len(nodes) - SHOWN_NODES} more")
    return f"cluster.pools: {demands}: {heading}. {'; '.join(shown) or 'The cluster has no nodes left for it'}"


def _node_shown(parts: Sequence[Part], node: Node, free: Resources) -> str:
    """Return text about what the node has of the resources and labels that `parts` ask for."""
    names = sorted({name for part in parts for name in part.per_slot})
    keys = sorted({key for part in parts for key in part.labels})
    labels = "".join(f", {key}={node.labels.get(key, 'none')}" for key in keys)
    shown = (f"{_amount(name, free.get(name, 0))} of {_amount(name, node.total.get(name, 0))} {name}" for name in names)
    return f"{node.address} ({node.node_id[:8]}) has {', '.join(shown) or 'none of the resources'}{labels}"


def _amounts(resources: Resources) -> str:
    return ", ".join(f"{_amount(name, amount)} {name}" for name, amount in resources.items()) or "nothing else"


def _amount(name: str, amount: float) -> str:
    return f"{amount / GIB:g} GiB" if name == "memory" else f"{amount:g}"
