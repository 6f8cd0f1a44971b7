"""Pools on a Ray cluster: one placement group for a pool's part of a node, a bundle for each of its slots.

Where each part goes is decided before anything is asked of Ray (`pools.plan`), and Ray is told so by the node's own
label: it never waits for room that nobody has, and ranks follow the nodes in one order from the beginning.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.cluster.pools import DoesNotFit, Node, Part, Placed, parts_of, plan
from penstock.config.cluster import ClusterConfig
from penstock.deadline import Stalled

NODE_ID = "ray.io/node-id"
"""Label that Ray gives every node."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place for one process, and what it may use there."""

    pool: str
    rank: int
    """Within the pool: all of a node's slots follow each other."""
    local_rank: int
    """Within the pool's part of the node."""
    node: Node
    group: PlacementGroup
    part: Part

    def options(self, *, share: float = 1.0) -> dict[str, Any]:
        """For a Ray actor that lives here and uses `share` of the slot; several may, as long as it is enough."""
        wanted = {name: amount * share for name, amount in self.part.per_slot.items()}
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


def place(config: ClusterConfig) -> Pools:
    """All pools of the configuration, or nothing. Blocks, for `place_timeout_s` at most. Raises `DoesNotFit`: at once
    for what the nodes could not hold if they were all free, else when the time is up."""
    parts, give_up = parts_of(config), time.monotonic() + config.place_timeout_s
    chosen, groups = _plan(parts, give_up=give_up), list[PlacementGroup]()
    try:
        for placed in chosen:
            groups.append(_ask(placed))
        if all(group.wait(max(give_up - time.monotonic(), 0.0)) for group in groups):
            whole, groups = groups, []
            return Pools(_slots(chosen, whole))
    finally:
        for group in groups:
            remove_placement_group(group)
    raise Stalled(
        waiter="the run",
        resource=f"{sum(part.num_slots for part in parts)} slots of cluster.pools",
        holder="the Ray cluster, whose nodes had room when they were asked",
        seconds=config.place_timeout_s,
    )


def nodes() -> list[Node]:
    """The living nodes of the cluster."""
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


def _plan(parts: Sequence[Part], *, give_up: float) -> list[Placed]:
    """As soon as there is room."""
    while True:
        found = nodes()
        try:
            return plan(parts, found)
        except DoesNotFit:
            plan(parts, found, busy=False)
            if time.monotonic() >= give_up:
                raise
        time.sleep(POLL_S)


def _ask(placed: Placed) -> PlacementGroup:
    part = placed.part
    group: PlacementGroup = placement_group(
        [dict(part.per_slot) for _ in range(part.num_slots)],
        strategy="STRICT_PACK",
        name=f"penstock-{part.pool}-{part.index}-{secrets.token_hex(4)}",  # no two on a cluster have one name
        bundle_label_selector=[{NODE_ID: placed.node.node_id}] * part.num_slots,
    )
    return group


def _slots(chosen: Sequence[Placed], groups: Sequence[PlacementGroup]) -> dict[str, list[Slot]]:
    found: dict[str, list[Slot]] = {}
    for placed, group in zip(chosen, groups, strict=True):
        slots = found.setdefault(placed.part.pool, [])
        slots += [
            Slot(
                pool=placed.part.pool,
                rank=len(slots) + number,
                local_rank=number,
                node=placed.node,
                group=group,
                part=placed.part,
            )
            for number in range(placed.part.num_slots)
        ]
    return found
