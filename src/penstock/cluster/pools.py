"""Which node holds which part of which pool. Pure: nodes and demands in, a plan or a reason out.

A pool asks for slots on a number of different nodes, and each node's part must fit there as a whole: CPUs,
accelerators, memory and labels, counted per node and never over the cluster. Parts of different pools may share a node.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.config.cluster import GIB, ClusterConfig
from penstock.config.errors import ConfigError

Resources = Mapping[str, float]
"""By the cluster's names for them; memory in bytes."""

Bundles = Mapping[str, Sequence[Sequence[int]]]
"""Of how many slots each bundle is made, by pool and node."""

MAX_TRIES = 20_000
"""Of assigning one part to one node, before a plan is given up as not found."""
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
    """What a pool asks of one node."""

    pool: str
    index: int
    """Which of the pool's nodes, from 0 on."""
    bundles: tuple[int, ...]
    """Of how many slots each is made; each is for one process."""
    per_slot: Resources
    labels: Mapping[str, str]

    @property
    def num_slots(self) -> int:
        return sum(self.bundles)

    @property
    def wanted(self) -> dict[str, float]:
        """Of all its slots."""
        return self.wanted_by(self.num_slots)

    def wanted_by(self, num_slots: int) -> dict[str, float]:
        """Of so many of them."""
        return {name: amount * num_slots for name, amount in self.per_slot.items()}

    def __str__(self) -> str:
        labels = f" with {', '.join(f'{k}={v}' for k, v in self.labels.items())}" if self.labels else ""
        slots = "1 slot" if self.num_slots == 1 else f"{self.num_slots} slots"
        return f"pool {self.pool}, node {self.index + 1}: {slots}, {_amounts(self.wanted)} on one node{labels}"


@dataclass(frozen=True, slots=True)
class Placed:
    """A part, and where it goes."""

    part: Part
    node: Node


def parts_of(config: ClusterConfig, bundles: Bundles | None = None) -> list[Part]:
    """What the pools in `bundles` ask for, in the order of the configuration; by default all, each slot by itself."""
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
    """A node for every part, in the order of the ranks: by pool as configured, then by node, whatever order the cluster
    lists its nodes in. Raises `DoesNotFit`. With `busy` only what is free counts, else all that a node has."""
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
    """What `nodes` have left where a plan had found room, `seconds` after it was asked for."""
    present = {node.node_id: node for node in nodes}
    shown = []
    for placed in lacking:
        node = present.get(placed.node.node_id)
        left = _node_shown([placed.part], node, node.free) if node is not None else f"{placed.node.address} is gone"
        shown.append(f"{placed.part}: {left}")
    return (
        f"cluster.pools: {'; '.join(shown)}. There was room when the nodes were asked, and none for {seconds:.0f} s "
        "after that: wait until others end, or raise cluster.place_timeout_s"
    )


class _Search:
    """Depth first, the hardest part and the tightest node first."""

    def __init__(self, parts: Sequence[Part], nodes: Sequence[Node], free: Mapping[str, Resources]) -> None:
        self._parts, self._nodes = parts, nodes
        self._free = {node_id: dict(amounts) for node_id, amounts in free.items()}
        self._used: dict[str, set[str]] = {part.pool: set() for part in parts}
        """Nodes of each pool."""
        self._left = MAX_TRIES

    @property
    def given_up(self) -> bool:
        """It ended before everything was tried."""
        return self._left <= 0

    def run(self) -> list[Placed] | None:
        """None if there is no plan, or none was found."""
        chosen: list[Placed] = []
        left: list[Iterator[Node]] = []
        """Of each chosen part, and of the one to be chosen: nodes that were not tried yet."""
        while len(chosen) < len(self._parts):
            if self.given_up:
                return None
            part = self._parts[len(chosen)]
            if len(left) == len(chosen):
                left.append(self._candidates(part))
            self._left -= 1
            if node := next(left[-1], None):
                chosen.append(Placed(part, node))
                self._take(chosen[-1])
            elif chosen:
                left.pop()
                self._give_back(chosen.pop())
            else:
                return None
        return chosen

    def _candidates(self, part: Part) -> Iterator[Node]:
        """Nodes that can hold it now, of several alike only one."""
        fitting = [
            node
            for node in self._nodes
            if node.node_id not in self._used[part.pool] and fits(part, self._free[node.node_id], node.labels)
        ]
        fitting.sort(key=lambda node: sum(self._free[node.node_id].get(name, 0.0) for name in part.per_slot))
        seen = set()
        for node in fitting:
            kind = (frozenset(self._free[node.node_id].items()), frozenset(node.labels.items()))
            if any(node.node_id in used for used in self._used.values()):
                yield node
            elif kind not in seen:
                seen.add(kind)
                yield node

    def _take(self, placed: Placed) -> None:
        self._move(placed, -1.0)
        self._used[placed.part.pool].add(placed.node.node_id)

    def _give_back(self, placed: Placed) -> None:
        self._move(placed, 1.0)
        self._used[placed.part.pool].discard(placed.node.node_id)

    def _move(self, placed: Placed, sign: float) -> None:
        free = self._free[placed.node.node_id]
        for name, amount in placed.part.wanted.items():
            free[name] = free.get(name, 0.0) + sign * amount


def fits(part: Part, free: Resources, labels: Mapping[str, str]) -> bool:
    """On a node with so much free and these labels."""
    has_labels = all(labels.get(key) == value for key, value in part.labels.items())
    return has_labels and all(free.get(name, 0.0) + EPSILON >= amount for name, amount in part.wanted.items())


def _size(part: Part, nodes: Sequence[Node]) -> float:
    """The largest share that it takes of what one node has at most."""
    most = {name: max((node.total.get(name, 0.0) for node in nodes), default=0.0) for name in part.per_slot}
    return max((amount / most[name] if most[name] else float("inf") for name, amount in part.wanted.items()), default=0)


def _by_address(node: Node) -> tuple[int, int, str, str]:
    """Numbers as numbers, so that 10.0.0.9 comes before 10.0.0.10."""
    try:
        address = ipaddress.ip_address(node.address)
    except ValueError:
        return 9, 0, node.address, node.node_id
    return address.version, int(address), "", node.node_id


def _why(parts: Sequence[Part], nodes: Sequence[Node], free: Mapping[str, Resources], *, given_up: bool) -> str:
    """The parts that fit nowhere, if there are such; else all of them, which do not fit together."""
    lonely = [part for part in parts if not any(fits(part, free[node.node_id], node.labels) for node in nodes)]
    blamed = lonely or parts
    heading = "fits on no node" if lonely else "do not all fit at once, each pool on different nodes"
    if given_up and not lonely:
        heading = f"were not fitted in {MAX_TRIES} tries"
    asked = "; ".join(dict.fromkeys(map(str, blamed)))
    return f"cluster.pools: {asked}: {heading}. {_nodes_shown(blamed, nodes, free)}"


def _nodes_shown(parts: Sequence[Part], nodes: Sequence[Node], free: Mapping[str, Resources]) -> str:
    if not nodes:
        return "There are no nodes left for it"
    shown = [_node_shown(parts, node, free[node.node_id]) for node in nodes[:SHOWN_NODES]]
    more = f"; and {len(nodes) - SHOWN_NODES} more" if len(nodes) > SHOWN_NODES else ""
    return "; ".join(shown) + more


def _node_shown(parts: Sequence[Part], node: Node, free: Resources) -> str:
    """What it has of what these ask for."""
    names = sorted({name for part in parts for name in part.per_slot})
    keys = sorted({key for part in parts for key in part.labels})
    labels = "".join(f", {key}={node.labels.get(key, 'none')}" for key in keys)
    return f"{node.address} ({node.node_id[:8]}) has {_held(names, free, node.total)}{labels}"


def _held(names: Sequence[str], free: Resources, total: Resources) -> str:
    pairs = [(name, _amount(name, free.get(name, 0.0)), _amount(name, total.get(name, 0.0))) for name in names]
    return ", ".join(f"{has} of {most} {name}" for name, has, most in pairs) or "nothing asked for"


def _amounts(resources: Resources) -> str:
    return ", ".join(f"{_amount(name, amount)} {name}" for name, amount in resources.items()) or "nothing else"


def _amount(name: str, amount: float) -> str:
    return f"{amount / GIB:g} GiB" if name == "memory" else f"{amount:g}"
