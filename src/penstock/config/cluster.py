"""Where processes lie on many machines: pools of slots, and which roles live in which."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.config.section import Section

Role = Literal["actor", "critic", "reference", "reward", "rollout", "environment"]
Labels = dict[str, str]
"""A node must carry all of them."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,31}$")]
GIB = 1 << 30


class NodeConfig(Section):
    """One of a pool's nodes, where they are not all alike."""

    slots: int = Field(1, ge=1)
    labels: Labels = Field(default_factory=dict)
    """Beside those of the pool."""


class PoolConfig(Section):
    """Slots for worker processes: `slots_per_node` on each of `nodes` different machines."""

    roles: list[Role] = Field(default_factory=list)
    """Who lives here. A role lives in one pool only."""
    nodes: Annotated[int, Field(ge=1)] | list[NodeConfig] = 1
    """How many nodes, or one entry for each where they differ."""
    slots_per_node: int = Field(1, ge=1)
    """Of a number of nodes; a list says it for each."""
    cpus: float = Field(1.0, ge=0)
    """Of each slot."""
    accelerators: float = Field(0.0, ge=0)
    """Of each slot: a fraction is a share of a device."""
    accelerator: str = Field("GPU", min_length=1)
    """Resource that the cluster counts them by: `GPU`, `NPU`, ..."""
    memory_gib: float = Field(0.0, ge=0)
    """Of each slot; 0 asks for none."""
    labels: Labels = Field(default_factory=dict)
    """Of every node, such as `{ray.io/accelerator-type: H100}`."""

    @model_validator(mode="after")
    def _has_nodes(self) -> PoolConfig:
        if self.nodes == []:
            raise ValueError("a pool has at least one node")
        return self

    @property
    def each_node(self) -> list[NodeConfig]:
        """The nodes, one by one."""
        if isinstance(self.nodes, int):
            return [NodeConfig(slots=self.slots_per_node)] * self.nodes
        return list(self.nodes)

    def spread(self, num_slots: int) -> list[int]:
        """So many slots on as few nodes as have them, by node, the largest first. What they lack counts as the last
        one's."""
        shares: list[int] = []
        for slots in sorted((node.slots for node in self.each_node), reverse=True):
            if sum(shares) < num_slots:
                shares.append(min(slots, num_slots - sum(shares)))
        return [*shares[:-1], num_slots - sum(shares[:-1])]

    @property
    def per_slot(self) -> dict[str, float]:
        """What a slot takes, by the cluster's names for it; memory in bytes."""
        wanted = {"CPU": self.cpus, self.accelerator: self.accelerators, "memory": self.memory_gib * GIB}
        return {name: amount for name, amount in wanted.items() if amount}


class ClusterConfig(Section):
    """Machines of a Ray cluster (`penstock[ray]`). Without an address everything runs on this one."""

    address: str | None = None
    """`auto`, or host:port of the cluster's head."""
    pools: dict[Name, PoolConfig] = Field(default_factory=dict)
    place_timeout_s: float = Field(60.0, gt=0)
    """How long to wait for room that others hold now. What no node could ever hold is refused at once."""

    @model_validator(mode="after")
    def _one_pool_per_role(self) -> ClusterConfig:
        home: dict[Role, str] = {}
        for name, pool in self.pools.items():
            for role in pool.roles:
                if role in home:
                    raise ValueError(
                        f"pools: role {role} is in {home[role]} and in {name}, and a role lives in one pool only: "
                        "remove it from one of them"
                    )
                home[role] = name
        return self

    def pool_of(self, role: str) -> str | None:
        """Name of the pool where `role` lives; None if it lives in none."""
        return next((name for name, pool in self.pools.items() if role in pool.roles), None)
