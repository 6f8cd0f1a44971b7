"""Which part of the arguments each rank of a group gets, and whose results are collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.groups.errors import CallRefused

Over = Literal["ranks", "dp", "dp_pp", "pp"]
"""What arguments are cut over and results are collected over. `ranks`: every rank is a part of its own. The others need
a mesh, and ranks that differ otherwise get the same part. `dp`: data-parallel ranks; results of tensor rank 0 in the
last pipeline stage. `dp_pp`: the stages as if they were data-parallel, part dp * stages + pp; results of tensor rank 0.
`pp`: the stages; results of tensor and data-parallel rank 0."""


@dataclass(frozen=True, slots=True)
class MeshRank:
    """Where a worker stands among the parallel dimensions. `tp` counts all whose peers share samples: context- and
    sequence-parallel ones too."""

    dp: int
    tp: int = 0
    pp: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one call."""

    of_rank: Mapping[int, int]
    """The part of every rank that is called."""
    collectors: tuple[int, ...]
    """The rank whose result counts, by part."""

    def __len__(self) -> int:
        return len(self.collectors)


def every_rank(size: int) -> Parts:
    """Its own part."""
    return Parts({rank: rank for rank in range(size)}, tuple(range(size)))


def only(rank: int) -> Parts:
    """The one that is called."""
    return Parts({rank: 0}, (rank,))


class Mesh:
    """Where all workers of a role stand. Raises CallRefused if that is no mesh: parts without gaps, and exactly one
    rank to collect each of them from."""

    def __init__(self, role: str, ranks: Sequence[MeshRank]) -> None:
        self._role, self._ranks = role, ranks
        if wrong := [rank for rank in ranks if not isinstance(rank, MeshRank)]:
            raise CallRefused(f"{role}.mesh_rank() returned {wrong[0]!r}, expected a MeshRank")
        self._num_stages = 1 + max(rank.pp for rank in ranks)
        last = self._num_stages - 1
        self._parts: dict[Over, Parts] = {
            "dp": self._over("dp", lambda at: at.dp, lambda at: at.tp == 0 and at.pp == last),
            "dp_pp": self._over("dp x pp", lambda at: at.dp * self._num_stages + at.pp, lambda at: at.tp == 0),
            "pp": self._over("pp", lambda at: at.pp, lambda at: at.tp == 0 and at.dp == 0),
        }

    def parts(self, over: Over) -> Parts:
        return self._parts[over]

    def _over(self, name: str, part: Callable[[MeshRank], int], collects: Callable[[MeshRank], bool]) -> Parts:
        of_rank = {rank: part(at) for rank, at in enumerate(self._ranks)}
        if missing := set(range(max(of_rank.values()) + 1)) - set(of_rank.values()):
            raise CallRefused(f"the mesh of {self._role} has no worker of {name} rank {min(missing)}: {self}")
        collectors: dict[int, list[int]] = {index: [] for index in sorted(of_rank.values())}
        for rank, at in enumerate(self._ranks):
            if collects(at):
                collectors[of_rank[rank]].append(rank)
        for index, ranks in collectors.items():
            if len(ranks) != 1:
                raise CallRefused(
                    f"the mesh of {self._role} collects {name} rank {index} from workers {ranks}, expected exactly "
                    f"one: {self}"
                )
        return Parts(of_rank, tuple(ranks[0] for ranks in collectors.values()))

    def __str__(self) -> str:
        places = [f"{rank} is dp {at.dp}, tp {at.tp}, pp {at.pp}" for rank, at in enumerate(self._ranks)]
        return "worker " + "; ".join(places)
