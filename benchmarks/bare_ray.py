"""What a group call costs over a bare one of Ray, and how long many slots take to be placed; on a Ray cluster of this
machine. Its nodes claim more resources than there are.

Ours and bare calls take turns in rounds, on actors of their own in the same slots' nodes; a ratio is that of medians.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster

from penstock.cluster.placement import place
from penstock.cluster.ray_group import RayBackend
from penstock.config.cluster import ClusterConfig
from penstock.groups.batch import Batch
from penstock.groups.collect import concat
from penstock.groups.group import Group
from penstock.groups.intent import Shard
from penstock.groups.method import remote_method
from penstock.groups.role import Rank, Role

NUM_RANKS = 4
BATCH_BYTES, ROW_BYTES = 100 << 20, 4096
NUM_NODES, SLOTS_PER_NODE = 10, 100
"""That many are placed."""


class Worker:
    """Of a group."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @remote_method()
    def echo(self, value: float) -> float:
        return value

    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def doubled(self, batch: Batch) -> Batch:
        return Batch({"rows": batch["rows"] * 2})


class Bare:
    """The same for Ray alone."""

    def echo(self, value: float) -> float:
        return value

    def doubled(self, rows: Any) -> Any:
        return rows * 2


def on_ray(*, rounds: int) -> dict[str, float]:
    """`call_vs_bare_ray` (time), `dispatch_collect_vs_bare_ray` (rate), `place_1000_bundles_s`."""
    with cluster(NUM_NODES):
        figures = {"place_1000_bundles_s": placing_s()}
        with place(pools("workers", nodes=1, slots=2 * NUM_RANKS)) as placed:
            slots = placed["workers"]
            backend = RayBackend({"worker": Role(Worker)}, slots[:NUM_RANKS])
            group, host = Group(backend, "worker"), ray.remote(Bare)
            bare: list[Any] = [host.options(**slot.options()).remote() for slot in slots[NUM_RANKS:]]
            batch = Batch({"rows": np.ones((BATCH_BYTES // ROW_BYTES, ROW_BYTES // 4), dtype=np.float32)})
            calls = in_turns(
                lambda: group.echo(1.0), lambda: ray.get([actor.echo.remote(1.0) for actor in bare]), rounds=20 * rounds
            )
            batches = in_turns(lambda: group.doubled(batch), lambda: bare_doubled(bare, batch["rows"]), rounds=rounds)
            backend.close()
    return figures | {
        "call_vs_bare_ray": calls[0] / calls[1],
        "call_ms": 1e3 * calls[0],
        "dispatch_collect_vs_bare_ray": batches[1] / batches[0],
        "dispatch_collect_mb_per_s": BATCH_BYTES / (1 << 20) / batches[0],
    }


def bare_doubled(actors: list[Any], rows: Any) -> Any:
    chunks = np.array_split(rows, len(actors))
    return np.concatenate(ray.get([actor.doubled.remote(chunk) for actor, chunk in zip(actors, chunks, strict=True)]))


def in_turns(ours: Callable[[], object], bare: Callable[[], object], *, rounds: int) -> tuple[float, float]:
    """Median seconds of each, after one to warm up."""
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):
        for call, seconds in zip((ours, bare), spent, strict=True):
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
    return median(spent[0][1:]), median(spent[1][1:])


def placing_s() -> float:
    """From the configuration to slots."""
    started = time.perf_counter()
    with place(pools("many", nodes=NUM_NODES, slots=SLOTS_PER_NODE)) as placed:
        seconds = time.perf_counter() - started
        assert len(placed["many"]) == NUM_NODES * SLOTS_PER_NODE
    return seconds


def pools(name: str, *, nodes: int, slots: int) -> ClusterConfig:
    return ClusterConfig.model_validate({"pools": {name: {"nodes": nodes, "slots_per_node": slots, "cpus": 0.001}}})


@contextmanager
def cluster(num_nodes: int) -> Iterator[str]:
    """A head and so many nodes; gives its address."""
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    path = os.pathsep.join(path for path in sys.path if path)
    try:
        for _ in range(num_nodes):
            started.add_node(num_cpus=8)
        ray.init(address=started.address, logging_level=logging.ERROR, runtime_env={"env_vars": {"PYTHONPATH": path}})
        yield started.address
    finally:
        ray.shutdown()
        started.shutdown()  # type: ignore[no-untyped-call]
