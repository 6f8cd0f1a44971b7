"""The mesh of a group: the part of the arguments that each rank gets, and the ranks that return the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.groups.errors import CallRefused

Over = Literal["ranks", "dp", "dp_pp", "pp"]
"""The dimension over which arguments are cut and results are collected.

`ranks`: every rank is a part of its own. The other values need a mesh; ranks that differ only in other dimensions get
the same part. `dp`: one part per data-parallel rank; results come from tensor rank 0 in the last pipeline stage.
`dp_pp`: pipeline stages count as data-parallel, part dp * stages + pp; results come from tensor rank 0. `pp`: one part
per pipeline stage; results come from tensor rank 0 and data-parallel rank 0."""


@dataclass(frozen=True, slots=True)
class MeshRank:
    """The coordinates of a worker in the parallel dimensions. `tp` covers all dimensions in which ranks share samples,
    also context and sequence parallelism."""

    dp: int
    tp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one call."""

    of_rank: Mapping[int, int]
    """The part of each rank that is called."""
    collectors: tuple[int, ...]
    """For each part, the rank that returns its result."""


def every_rank(size: int) -> Parts:
    """Return parts for a call on every rank, where each rank has a part of its own."""
    return Parts({rank: rank for rank in range(size)}, tuple(range(size)))


def only(rank: int) -> Parts:
    """Return the single part of a call on one rank."""
    return Parts({rank: 0}, (rank,))


def mesh_parts(role: str, mesh: Sequence[MeshRank]) -> dict[Over, Parts]:
    """Return the parts of calls over each dimension, from the coordinates of all workers of a role.

    Raises `CallRefused` if they form no mesh. A mesh has parts without gaps, and exactly one rank that returns the
    result of each part.
    """
    if wrong := [at for at in mesh if not isinstance(at, MeshRank)]:
        raise CallRefused(f"{role}.mesh_rank() returned {wrong[0]!r}, expected a MeshRank")
    num_stages = 1 + max(at.pp for at in mesh)
    last = num_stages - 1
    places = "; ".join(f"{rank} is dp {at.dp}, tp {at.tp}, pp {at.pp}" for rank, at in enumerate(mesh))

    def over(name: str, part_of: Callable[[MeshRank], int], collects: Callable[[MeshRank], bool]) -> Parts:
        of_rank = {rank: part_of(at) for rank, at in enumerate(mesh)}
        collectors = []
        for part in range(max(of_rank.values()) + 1):
            if part not in of_rank.values():
                raise CallRefused(f"the mesh of {role} has no worker of {name} rank {part}: worker {places}")
            ranks = [rank for rank, at in enumerate(mesh) if of_rank[rank] == part and collects(at)]
            if len(ranks) != 1:
                raise CallRefused(
                    f"the mesh of {role} collects {name} rank {part} from workers {ranks}, expected exactly one: "
                    f"worker {places}"
                )
            collectors += ranks
        return Parts(of_rank, tuple(collectors))

    return {
        "dp": over("dp", lambda at: at.dp, lambda at: at.tp == 0 and at.pp == last),
        "dp_pp": over("dp x pp", lambda at: at.dp * num_stages + at.pp, lambda at: at.tp == 0),
        "pp": over("pp", lambda at: at.pp, lambda at: at.tp == 0 and at.dp == 0),
    }
