"""Which process of a run lives in which slots of which pool. Pure, and known before a cluster is asked for anything.

A process takes a slot; the trainer, and whoever keeps ranks of it on another node, as many slots of that node as
processes compute for it there: its ranks, and those of roles that are split from them. Servers that take turns with it
live in its slots, if they live in one of its pools. What lives in no pool runs on the supervisor's machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

from penstock.cluster.pools import Bundles
from penstock.config.cluster import ClusterConfig, PoolConfig, Role
from penstock.config.errors import ConfigError
from penstock.ports import ProcessSpec

WITHIN: Mapping[Role, Role] = {"critic": "actor", "reference": "actor", "reward": "environment"}
"""What has no processes of its own unless it is split off, and in whose it lives."""
COUNTS = {
    "trainer": "trainer.ranks and trainer.split",
    "ranks": "trainer.ranks and trainer.split",
    "rollout": "rollout.servers",
    "env": "env.workers",
}
"""Settings that say how many slots the processes of a role take."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a process lives, or several that take turns."""

    pool: str
    node: int
    """Which of the pool's nodes, as configured, from 0 on."""
    bundle: int
    """Which of those that the pool has there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Where all processes live that live in pools."""

    seats: Mapping[str, Seat]
    """By the name of the process."""
    bundles: Bundles
    """Of the pools where somebody lives."""


def seating(config: ClusterConfig, specs: Sequence[ProcessSpec], *, split: Collection[str], in_turns: bool) -> Seating:
    """Largest first, the trainer before others of its size, on the node with the most free slots. `split`: the
    trainer's roles in processes of their own. `in_turns`: trainer and servers never compute at the same time. Raises
    `ConfigError` with the numbers."""
    if not config.pools:
        raise ConfigError("cluster.address is given without cluster.pools: say which roles live where, or leave it out")
    _check_within(config, split)
    seats: dict[str, Seat] = {}
    bundles: dict[str, list[list[int]]] = {}
    for name, pool in config.pools.items():
        inhabitants = [spec for spec in specs if spec.pool == name]
        inhabitants.sort(key=lambda spec: (-spec.num_slots, spec.role != "trainer"))
        trainers = [spec for spec in inhabitants if spec.role in ("trainer", "ranks")]
        guests = [spec for spec in inhabitants if spec.role == "rollout"] if in_turns and trainers else []
        if inhabitants:
            bundles[name] = _fill(name, pool, [spec for spec in inhabitants if spec not in guests], seats)
            seats |= _beside(guests, trainers, seats)
    return Seating(seats=seats, bundles=bundles)


def _check_within(config: ClusterConfig, split: Collection[str]) -> None:
    for role, home in WITHIN.items():
        pool, lives_in = config.pool_of(role), config.pool_of(home)
        if pool not in (None, lives_in) and role not in split:
            where = f"pool {lives_in}" if lives_in else "no pool"
            splitting = f", or {role} into trainer.split" if home == "actor" else ""
            raise ConfigError(
                f"cluster.pools.{pool}: role {role} lives in the processes of role {home}, which is in {where}: "
                f"put both into one pool{splitting}"
            )


def _fill(name: str, pool: PoolConfig, specs: Sequence[ProcessSpec], seats: dict[str, Seat]) -> list[list[int]]:
    """Returns the pool's bundles; what nobody lives in is a bundle of one slot."""
    free = [node.slots for node in pool.each_node]
    bundles: list[list[int]] = [[] for _ in free]
    for spec in specs:
        node = free.index(max(free))
        if free[node] < spec.num_slots:
            raise ConfigError(_too_small(name, pool, specs))
        seats[spec.name] = Seat(name, node, len(bundles[node]))
        bundles[node].append(spec.num_slots)
        free[node] -= spec.num_slots
    return [[*taken, *[1] * left] for taken, left in zip(bundles, free, strict=True)]


def _beside(guests: Sequence[ProcessSpec], hosts: Sequence[ProcessSpec], seats: Mapping[str, Seat]) -> dict[str, Seat]:
    """The seats of `hosts`, one guest for each of their slots in turn."""
    slots = cycle([seats[host.name] for host in hosts for _ in range(host.num_slots)])
    return {guest.name: seat for guest, seat in zip(guests, slots, strict=False)}


def _too_small(name: str, pool: PoolConfig, specs: Sequence[ProcessSpec]) -> str:
    """All that it lacks are slots: what takes several of a node was cut to fit (`PoolConfig.spread`)."""
    slots, needed = [node.slots for node in pool.each_node], Counter[str]()
    for spec in specs:
        needed[COUNTS[spec.role]] += spec.num_slots
    shown = " + ".join(f"{setting} {needed[setting]}" for setting in dict.fromkeys(COUNTS.values()) if needed[setting])
    return (
        f"cluster.pools.{name}: {shown} need {needed.total()} slots, and {len(slots)} nodes have {sum(slots)}: "
        "raise nodes or slots_per_node, or lower the others"
    )
