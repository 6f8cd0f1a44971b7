"""Pools on a Ray cluster: one placement group for each pool's part of a node, with a bundle for each process
there.

`pools.plan` decides the node of each part before Ray is asked. Each request names the node by its label. So Ray never
waits for resources that no node has, and ranks follow the nodes in a fixed order.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.cluster.pools import Bundles, DoesNotFit, Node, Part, Placed, parts_of, plan, why_not_held
from penstock.cluster.slot_assignments import SlotAssignment
from penstock.config.cluster import ClusterConfig

NODE_ID = "ray.io/node-id"
"""Label that Ray gives every node."""
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class HeldPart(Placed):
    """A part with reserved resources."""

    group: PlacementGroup


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one process with its resources: one bundle of a part, which may hold the resources of several
    configured slots."""

    held: HeldPart
    bundle: int
    """Index of the bundle within the part."""

    def options(self, *, share: float = 1.0) -> dict[str, Any]:
        """Return options for a Ray actor in this slot that uses the fraction `share` of it. Several actors fit as long
        as their shares sum to 1 at most."""
        part = self.held.part
        wanted = {name: amount * share for name, amount in part.wanted_by(part.bundles[self.bundle]).items()}
        return {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.held.group, self.bundle),
            "num_cpus": wanted.pop("CPU", 0.0),
            "num_gpus": wanted.pop("GPU", 0.0),
            "memory": int(wanted.pop("memory", 0.0)) or None,
            "resources": wanted or None,
        }


class Pools(AbstractContextManager["Pools"]):
    """All pools of a run. Their resources are held until `release`. A context manager."""

    def __init__(self, held: list[HeldPart]) -> None:
        self._held = held

    def __getitem__(self, pool: str) -> list[Slot]:
        """Return the slots of the pool by rank; the slots of a node are consecutive."""
        mine = (held for held in self._held if held.part.pool == pool)
        return [Slot(held, bundle) for held in mine for bundle in range(len(held.part.bundles))]

    def at(self, assignment: SlotAssignment) -> Slot:
        """Return the slot that holds this assignment now."""
        node = (assignment.pool, assignment.node)
        held = next(held for held in self._held if (held.part.pool, held.part.index) == node)
        return Slot(held, assignment.bundle)

    def replace(self, lost: HeldPart, *, within_s: float) -> None:
        """Move a part from its node, which is gone, to another node as soon as there is room. Blocks. Raises
        `DoesNotFit` after `within_s` seconds; then nothing has changed."""
        until = time.monotonic() + within_s
        others = {held.node.node_id for held in self._held if held.part.pool == lost.part.pool and held != lost}
        try:
            (found,) = _hold(_plan([lost.part], until=until, without=others, wait_for_nodes=True), until=until)
        except DoesNotFit as error:
            raise DoesNotFit(
                f"{error}. It was on {lost.node.address}, which is gone: join a node to the cluster, and resume the run"
            ) from None
        remove_placement_group(lost.group)
        self._held[self._held.index(lost)] = found

    def release(self) -> None:
        """Release all resources. Actors that still live there end."""
        for held in self._held:
            remove_placement_group(held.group)
        self._held = []

    def __exit__(self, *_: object) -> None:
        self.release()


def place(config: ClusterConfig, bundles: Bundles | None = None) -> Pools:
    """Reserve all pools of the configuration, or those in `bundles`. Reserve all of them or none. Blocks for at most
    `place_timeout_s`. Raises `DoesNotFit`: at once if the pools do not fit even on idle nodes, else after the time."""
    until = time.monotonic() + config.place_timeout_s
    return Pools(_hold(_plan(parts_of(config, bundles), until=until), until=until))


def living() -> set[str]:
    """Return the ids of the nodes that Ray considers alive."""
    return {each["NodeID"] for each in ray.nodes() if each["Alive"]}  # type: ignore[no-untyped-call]


def nodes() -> list[Node]:
    """Return the living nodes of the cluster with their resources."""
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
    parts: Sequence[Part], *, until: float, without: Collection[str] = (), wait_for_nodes: bool = False
) -> list[Placed]:
    """Return a plan as soon as there is room on nodes other than `without`. Parts that do not fit even on idle nodes
    raise `DoesNotFit` at once. With `wait_for_nodes` they wait as well, since a node may come back."""
    while True:
        found = [node for node in nodes() if node.node_id not in without]
        try:
            return plan(parts, found)
        except DoesNotFit:
            if not wait_for_nodes:
                plan(parts, found, busy=False)
            if time.monotonic() >= until:
                raise
        time.sleep(POLL_S)


def _hold(chosen: Sequence[Placed], *, until: float) -> list[HeldPart]:
    """Reserve all parts or none. Raises `DoesNotFit` when the time is up, because other users may have taken the room
    since the plan was made."""
    started = time.monotonic()
    with ExitStack() as undo:
        held = [_reserve(placed, undo) for placed in chosen]
        # Ray waits in whole seconds.
        lacking = [each for each in held if not each.group.wait(math.ceil(max(until - time.monotonic(), 0.0)))]
        if lacking:
            raise DoesNotFit(why_not_held(lacking, nodes(), seconds=time.monotonic() - started))
        undo.pop_all()
    return held


def _reserve(placed: Placed, undo: ExitStack) -> HeldPart:
    part = placed.part
    group: PlacementGroup = placement_group(
        [part.wanted_by(num_slots) for num_slots in part.bundles],
        strategy="STRICT_PACK",
        name=f"penstock-{part.pool}-{part.index}-{secrets.token_hex(4)}",  # names are unique on a cluster
        bundle_label_selector=[{NODE_ID: placed.node.node_id}] * len(part.bundles),
    )
    undo.callback(remove_placement_group, group)
    return HeldPart(part, placed.node, group)
