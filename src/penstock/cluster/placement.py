"""Pools on a Ray cluster: one placement group for a pool's part of a node, a bundle for each seat there.

Where each part goes is decided before anything is asked of Ray (`pools.plan`), and Ray is told so by the node's own
label: it never waits for room that nobody has, and ranks follow the nodes in one order from the beginning.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.cluster.pools import Bundles, DoesNotFit, Node, Part, Placed, parts_of, plan, why_not_held
from penstock.cluster.seats import Seat
from penstock.config.cluster import ClusterConfig

NODE_ID = "ray.io/node-id"
"""Label that Ray gives every node."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for one process, and what it may use there: a bundle of its part, which may be several slots' worth."""

    rank: int
    """Within its pool: all of a node's slots follow each other."""
    local_rank: int
    """Within the pool's part of the node: which bundle."""
    node: Node
    group: PlacementGroup
    part: Part

    def options(self, *, share: float = 1.0) -> dict[str, Any]:
        """For a Ray actor that lives here and uses `share` of the slot; several may, as long as it is enough."""
        num_slots = self.part.bundles[self.local_rank]
        wanted = {name: amount * share for name, amount in self.part.wanted_by(num_slots).items()}
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=self.local_rank
            ),
            "num_cpus": wanted.pop("CPU", 0.0),
            "num_gpus": wanted.pop("GPU", 0.0),
            "memory": int(wanted.pop("memory", 0.0)) or None,
            "resources": wanted or None,
        }


class Pools:
    """All pools of a run, held until `release`. A context manager."""

    def __init__(self, slots: dict[str, list[Slot]]) -> None:
        self._slots = slots

    def __getitem__(self, pool: str) -> list[Slot]:
        """Its slots by rank."""
        return self._slots[pool]

    def at(self, seat: Seat) -> Slot:
        """Where that is now."""
        return next(
            slot for slot in self._slots[seat.pool] if (slot.part.index, slot.local_rank) == (seat.node, seat.bundle)
        )

    def replace(self, part: Part, *, within_s: float) -> None:
        """Hold that part on another node than the one it was on, which is gone, as soon as there is room. Blocks.
        Raises `DoesNotFit` when the time is up, and holds what it held before."""
        give_up, before = time.monotonic() + within_s, self._slots[part.pool]
        others = {slot.node.node_id for slot in before if slot.part != part}
        try:
            (placed,) = _plan([part], give_up=give_up, without=others, patiently=True)
            (group,) = _hold([placed], give_up=give_up)
        except DoesNotFit as error:
            (address,) = {slot.node.address for slot in before if slot.part == part}
            raise DoesNotFit(
                f"{error}. It was on {address}, which is gone: join a node to the cluster, and resume the run"
            ) from None
        for gone in {slot.group.id: slot.group for slot in before if slot.part == part}.values():
            remove_placement_group(gone)
        self._slots[part.pool] = [
            replace(slot, node=placed.node, group=group) if slot.part == part else slot for slot in before
        ]

    def release(self) -> None:
        """Give everything back. Whatever still lives there ends."""
        for group in {slot.group.id: slot.group for slots in self._slots.values() for slot in slots}.values():
            remove_placement_group(group)
        self._slots = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def place(config: ClusterConfig, bundles: Bundles | None = None) -> Pools:
    """All pools of the configuration, or those in `bundles`; or nothing. Blocks, for `place_timeout_s` at most. Raises
    `DoesNotFit`: at once for what the nodes could not hold if they were all free, else when the time is up."""
    parts, give_up = parts_of(config, bundles), time.monotonic() + config.place_timeout_s
    chosen = _plan(parts, give_up=give_up)
    return Pools(_slots(chosen, _hold(chosen, give_up=give_up)))


def living() -> set[str]:
    """Ids of the nodes that Ray takes for living."""
    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}  # type: ignore[no-untyped-call]


def nodes() -> list[Node]:
    """The living nodes of the cluster, and what they have."""
    free: dict[str, dict[str, float]] = available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Node(
            node_id=each["NodeID"],
            address=each["NodeManagerAddress"],
            total=each["Resources"],
            free=free[each["NodeID"]],
            labels=each["Labels"],
        )
        for each in ray.nodes()  # type: ignore[no-untyped-call]
        if each["Alive"] and each["NodeID"] in free
    ]


def _plan(
    parts: Sequence[Part], *, give_up: float, without: Collection[str] = (), patiently: bool = False
) -> list[Placed]:
    """As soon as there is room on other nodes than `without`. What these could not hold if they were all free is
    refused at once, unless `patiently`: a node may come back."""
    while True:
        found = [node for node in nodes() if node.node_id not in without]
        try:
            return plan(parts, found)
        except DoesNotFit:
            if not patiently:
                plan(parts, found, busy=False)
            if time.monotonic() >= give_up:
                raise
        time.sleep(POLL_S)


def _hold(chosen: Sequence[Placed], *, give_up: float) -> list[PlacementGroup]:
    """All of it, or nothing. Others may have been faster: raises `DoesNotFit` when the time is up."""
    groups, started = list[PlacementGroup](), time.monotonic()
    try:
        for placed in chosen:
            groups.append(_ask(placed))
        lacking = [placed for placed, group in zip(chosen, groups, strict=True) if not _is_held(group, give_up)]
        if lacking:
            raise DoesNotFit(why_not_held(lacking, nodes(), seconds=time.monotonic() - started))
        whole, groups = groups, []
        return whole
    finally:
        for group in groups:
            remove_placement_group(group)


def _is_held(group: PlacementGroup, give_up: float) -> bool:
    """Waits for it until then; Ray counts whole seconds."""
    return group.wait(math.ceil(max(give_up - time.monotonic(), 0.0)))


def _ask(placed: Placed) -> PlacementGroup:
    part = placed.part
    group: PlacementGroup = placement_group(
        [part.wanted_by(num_slots) for num_slots in part.bundles],
        strategy="STRICT_PACK",
        name=f"penstock-{part.pool}-{part.index}-{secrets.token_hex(4)}",  # no two on a cluster have one name
        bundle_label_selector=[{NODE_ID: placed.node.node_id}] * len(part.bundles),
    )
    return group


def _slots(chosen: Sequence[Placed], groups: Sequence[PlacementGroup]) -> dict[str, list[Slot]]:
    found: dict[str, list[Slot]] = {}
    for placed, group in zip(chosen, groups, strict=True):
        slots = found.setdefault(placed.part.pool, [])
        slots += [
            Slot(
                rank=len(slots) + number,
                local_rank=number,
                node=placed.node,
                group=group,
                part=placed.part,
            )
            for number in range(len(placed.part.bundles))
        ]
    return found
