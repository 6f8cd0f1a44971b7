"""A driver: a student learns what a teacher knows, both of them groups of workers.

    python distil.py                             both roles in the same two processes
    python distil.py --split                     the teacher in two of its own
    python distil.py --ranks 4 --cluster auto    in slots of a pool of a Ray cluster

The output is the same for every placement of the roles.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from workers import Student, Teacher

from penstock.groups.batch import Batch
from penstock.groups.fused import Layout, Roles, Start, place
from penstock.groups.role import Role
from penstock.groups.spawned import SpawnedBackend

NUM_FEATURES, NUM_ROWS, NUM_STEPS = 8, 250, 40


def distil(roles: Roles) -> None:
    """Train the student. 250 rows are no multiple of four ranks: parts are padded, and results are not."""
    rows = np.random.default_rng(0).normal(size=(NUM_ROWS, NUM_FEATURES))
    batch = roles.teacher.label(Batch({"x": rows}))
    for step in range(1, NUM_STEPS + 1):
        gradients, errors = zip(*roles.student.gradient(batch), strict=True)
        roles.student.step(sum(gradients) / len(batch))
        if step % 10 == 0:
            print(f"step {step}: mean squared error {sum(errors) / len(batch):.2e}")


@contextmanager
def starting(layout: Layout, num_ranks: int, cluster: str | None, private: bool) -> Iterator[Start]:
    """Yield the function that starts the workers of a place: in processes of this machine, or as Ray actors."""
    if cluster is None:
        yield lambda _, together: SpawnedBackend(together, num_ranks)
        return
    from penstock.cluster.connection import connected
    from penstock.cluster.placement import place as hold
    from penstock.cluster.ray_group import RayBackend
    from penstock.config.cluster import ClusterConfig

    pools = {name: {"slots_per_node": num_ranks, "cpus": 0.1} for name in layout}
    with connected(cluster, private=private), hold(ClusterConfig.model_validate({"pools": pools})) as held:
        yield lambda name, together: RayBackend(together, held[name])


def main() -> None:
    parser = argparse.ArgumentParser(description="A student learns what a teacher knows.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--split", action="store_true", help="the teacher has processes of its own")
    parser.add_argument("--cluster", metavar="ADDRESS", help="`auto`, or host:port of a Ray cluster's head")
    parser.add_argument("--private", action="store_true", help="only people whom you trust reach that cluster's ports")
    args = parser.parse_args()
    roles = {
        "student": Role(Student, {"num_features": NUM_FEATURES, "learning_rate": 0.3}),
        "teacher": Role(Teacher, {"num_features": NUM_FEATURES, "seed": 1}),
    }
    fused, split = {"all": ["student", "teacher"]}, {"students": ["student"], "teachers": ["teacher"]}
    layout = split if args.split else fused
    with starting(layout, args.ranks, args.cluster, args.private) as start, place(roles, layout, start) as placed:
        distil(placed)


if __name__ == "__main__":
    main()
