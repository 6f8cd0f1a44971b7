"""Placement of processes on many machines: pools of slots, and the roles that run in each pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from penstock.config.section import Section

Role = Literal["actor", "critic", "reference", "reward", "rollout", "environment"]
Labels = dict[str, str]
"""Labels that a node must carry, all of them."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]
GIB = 1 << 30


class NodeConfig(Section):
    """One node, for a pool with nodes that differ."""

    slots: int = Field(1, ge=1)
    labels: Labels = Field(default_factory=dict)
    """Labels of this node, in addition to those of the pool."""


class PoolConfig(Section):
    """Slots for worker processes: `slots_per_node` on each of `nodes` different machines."""

    roles: list[Role] = Field(default_factory=list)
    """Roles that run in this pool. A role belongs to one pool only."""
    nodes: Annotated[int, Field(ge=1)] | list[NodeConfig] = 1
    """Number of nodes, or a list with one entry per node where the nodes differ."""
    slots_per_node: int = Field(1, ge=1)
    """Slots on each node if `nodes` is a number. If `nodes` is a list, each entry gives its own number."""
    cpus: float = Field(1.0, ge=0)
    """CPUs of each slot."""
    accelerators: float = Field(0.0, ge=0)
    """Accelerators of each slot; a fraction is a share of one device."""
    accelerator: str = Field("GPU", min_length=1)
    """Name of the accelerator resource in the cluster: `GPU`, `NPU`, ..."""
    memory_gib: float = Field(0.0, ge=0)
    """Memory of each slot, in GiB; 0 requests none."""
    labels: Labels = Field(default_factory=dict)
    """Labels that every node must carry, such as `{ray.io/accelerator-type: H100}`."""

    def contradictions(self) -> Iterator[str]:
        if self.nodes == []:
            yield "a pool has at least one node"

    @property
    def each_node(self) -> list[NodeConfig]:
        """Return one entry per node."""
        if isinstance(self.nodes, int):
            return [NodeConfig(slots=self.slots_per_node)] * self.nodes
        return list(self.nodes)

    def spread(self, num_slots: int) -> list[int]:
        """Return how many of `num_slots` slots each node takes, using as few nodes as possible, largest node first.
        Slots that exceed the capacity of the pool are added to the last node's share."""
        shares: list[int] = []
        for slots in sorted((node.slots for node in self.each_node), reverse=True):
            if sum(shares) < num_slots:
                shares.append(min(slots, num_slots - sum(shares)))
        return [*shares[:-1], num_slots - sum(shares[:-1])]

    @property
    def per_slot(self) -> dict[str, float]:
        """Resources of one slot, by the cluster's resource names; memory in bytes."""
        wanted = {"CPU": self.cpus, self.accelerator: self.accelerators, "memory": self.memory_gib * GIB}
        return {name: amount for name, amount in wanted.items() if amount}


class ClusterConfig(Section):
    """Machines of a Ray cluster (`penstock[ray]`). Without an address, everything runs on this machine."""

    address: str | None = None
    """host:port of the cluster's head, or `auto`: the address in RAY_ADDRESS, or else the only cluster that has a node
    of this user on this machine."""
    private: bool = False
    """Only people whom you trust reach the ports of the cluster, other users of its machines included. Without it, a
    cluster that asks for no token is refused: any program that reaches its ports can run programs there as you."""
    pools: dict[Name, PoolConfig] = Field(default_factory=dict)
    place_timeout_s: float = Field(60.0, gt=0)
    """Seconds to wait for resources that other jobs hold now. A request that no node can ever satisfy is refused at
    once."""

    def contradictions(self) -> Iterator[str]:
        home: dict[Role, str] = {}
        for name, pool in self.pools.items():
            for role in pool.roles:
                if role in home:
                    yield (
                        f"pools: role {role} is in {home[role]} and in {name}, and a role lives in one pool only: "
                        "remove it from one of them"
                    )
                home[role] = name

    def pool_of(self, role: str) -> str | None:
        """Return the name of the pool that `role` belongs to; None if it belongs to no pool."""
        return next((name for name, pool in self.pools.items() if role in pool.roles), None)
