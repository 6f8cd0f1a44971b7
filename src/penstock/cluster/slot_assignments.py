"""The assignment of processes to the slots of pools. Pure, and computed before anything is asked of a cluster.

A process takes one slot. The trainer's processes are an exception. On each node one of them (the trainer, or else the
first of its ranks there) takes one slot for every process that computes for the trainer on that node. The other ranks
share these slots. Servers that take turns with the trainer share its slots if they are in one of its pools. Processes
without a pool run on the supervisor's machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from penstock.cluster.pools import Bundles
from penstock.config.cluster import ClusterConfig, PoolConfig, Role
from penstock.config.invalid_settings import ConfigError
from penstock.ports.process_launcher import ProcessSpec

WITHIN: Mapping[Role, Role] = {"critic": "actor", "reference": "actor", "reward": "environment"}
"""The role that shares its processes with each of these roles, unless they are split off."""
LEARN = ("trainer", "rank")
"""Roles of the trainer and of its ranks."""
COUNTS = {
    "trainer": "trainer.ranks and trainer.split",
    "rank": "trainer.ranks and trainer.split",
    "rollout": "rollout.servers",
    "env": "env.workers",
}
"""Settings that determine how many slots the processes of a role take."""


@dataclass(frozen=True, slots=True)
class SlotAssignment:
    """The slots of a process, or of several processes that take turns."""

    pool: str
    node: int
    """Index among the pool's configured nodes, from 0."""
    bundle: int
    """Index among the pool's bundles on that node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotAssignments:
    """The slots of all processes that run in pools."""

    by_process: Mapping[str, SlotAssignment]
    """By the name of the process."""
    bundles: Bundles
    """Bundles of the pools that have at least one process."""


def assign_slots(
    config: ClusterConfig, specs: Sequence[ProcessSpec], *, split: Collection[str], in_turns: bool
) -> SlotAssignments:
    """Assign slots to each process of a pool, the largest first, on the node with the most free slots. The trainer
    goes before other processes of its size. `split`: roles of the trainer that have processes of their own.
    `in_turns`: trainer and servers never compute at the same time. Raises `ConfigError` with the numbers."""
    if not config.pools:
        raise ConfigError("cluster.pools is empty: add pools with their roles, or remove cluster.address")
    _check_within(config, split)
    assigned: dict[str, SlotAssignment] = {}
    bundles: dict[str, list[list[int]]] = {}
    for name, pool in config.pools.items():
        members = [spec for spec in specs if spec.pool == name and not spec.beside]
        members.sort(key=lambda spec: (-spec.num_slots, spec.role not in LEARN))
        trainers = [spec for spec in members if spec.role in LEARN]
        sharing = [spec for spec in members if in_turns and trainers and spec.role == "rollout"]
        if members:
            bundles[name] = _fill(name, pool, [spec for spec in members if spec not in sharing], assigned)
            slots = cycle([assigned[spec.name] for spec in trainers for _ in range(spec.num_slots)])
            assigned |= {spec.name: slot for spec, slot in zip(sharing, slots, strict=False)}
    assigned |= {spec.name: assigned[spec.beside] for spec in specs if spec.beside in assigned}
    return SlotAssignments(by_process=assigned, bundles=bundles)


def _check_within(config: ClusterConfig, split: Collection[str]) -> None:
    for role, home in WITHIN.items():
        pool, home_pool = config.pool_of(role), config.pool_of(home)
        if pool not in (None, home_pool) and role not in split:
            where = f"pool {home_pool}" if home_pool else "no pool"
            splitting = f", or {role} into trainer.split" if home == "actor" else ""
            raise ConfigError(
                f"cluster.pools.{pool}: role {role} runs in the processes of role {home}, which is in {where}: "
                f"put both into one pool{splitting}"
            )


def _fill(
    name: str, pool: PoolConfig, specs: Sequence[ProcessSpec], assigned: dict[str, SlotAssignment]
) -> list[list[int]]:
    """Assign slots in one pool. Returns the pool's bundles; each unused slot is a bundle of its own."""
    free = [node.slots for node in pool.each_node]
    bundles: list[list[int]] = [[] for _ in free]
    for spec in specs:
        node = free.index(max(free))
        if free[node] < spec.num_slots:
            raise ConfigError(_too_small(name, pool, specs))
        assigned[spec.name] = SlotAssignment(name, node, len(bundles[node]))
        bundles[node].append(spec.num_slots)
        free[node] -= spec.num_slots
    return [[*taken, *[1] * left] for taken, left in zip(bundles, free, strict=True)]


def _too_small(name: str, pool: PoolConfig, specs: Sequence[ProcessSpec]) -> str:
    """Return the error message for a pool with too few slots. Slots are the only cause: processes that take several
    slots of a node were sized to fit (`PoolConfig.spread`)."""
    slots, needed = [node.slots for node in pool.each_node], Counter[str]()
    for spec in specs:
        needed[COUNTS[spec.role]] += spec.num_slots
    shown = " + ".join(f"{setting} {needed[setting]}" for setting in dict.fromkeys(COUNTS.values()) if needed[setting])
    return (
        f"cluster.pools.{name}: {shown} need {needed.total()} slots, and {len(slots)} nodes have {sum(slots)}: "
        "raise nodes or slots_per_node, or lower the other settings"
    )
