"""Workers for the tests of groups, in a module that their processes can import."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from penstock.groups.batch import Batch
from penstock.groups.collect import add, concat, reduce
from penstock.groups.intent import Broadcast, PerRank, Shard
from penstock.groups.mesh import MeshRank
from penstock.groups.method import remote_method, remote_methods
from penstock.groups.modes import Custom, Execute, Mode
from penstock.groups.role import Rank


def numbers(num_samples: int) -> Batch:
    return Batch(
        columns={"number": np.arange(num_samples)},
        values={"text": [str(i) for i in range(num_samples)]},
        meta={"temperature": 0.5},
    )


def doubled(batch: Batch) -> Batch:
    return Batch(columns={"number": batch["number"] * 2}, values={"text": batch["text"]})


class Unpicklable(Exception):
    def __init__(self, one: int, *, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Hopeless(Exception):
    hopeless = True


class PeerMissed(Exception):
    blames_peer = True


def deal(arguments: Mapping[str, Any], num_parts: int) -> Sequence[Mapping[str, Any]]:
    """Every n-th value to the same part."""
    if not isinstance(arguments["values"], list):
        raise ValueError("values are dealt, expected a list")
    return [{"values": arguments["values"][i::num_parts]} for i in range(num_parts)]


def deal_one_less(arguments: Mapping[str, Any], num_parts: int) -> Sequence[Mapping[str, Any]]:
    return deal(arguments, num_parts)[1:]


class Probe:
    """Says what it was given. `mesh`: (dp, tp, pp) by rank."""

    def __init__(self, rank: Rank, mesh: Sequence[tuple[int, int, int]] = (), fails: str = "") -> None:
        if fails:
            raise ValueError(fails)
        self.rank, self.mesh, self.calls = rank, mesh, 0
        self.log: list[Any] = []

    def mesh_rank(self) -> MeshRank:
        self.calls += 1
        return MeshRank(*self.mesh[self.rank.index])

    @remote_method()
    def num_asked(self) -> int:
        return self.calls

    @remote_method()
    def pid(self) -> int:
        return os.getpid()

    @remote_method(Mode.ONE_TO_ALL)
    def one_to_all(self, value: Any, scale: int = 1) -> Any:
        return self.rank.index, value, scale

    @remote_method(Mode.ALL_TO_ALL)
    def all_to_all(self, value: Any, scale: int = 1) -> Any:
        return self.rank.index, value, scale

    @remote_method(Mode.DP_COMPUTE)
    def dp_compute(self, value: Any, scale: Any = 1) -> Any:
        return self.rank.index, value, scale

    @remote_method(Mode.MEGATRON_COMPUTE)
    def megatron_compute(self, value: Any, scale: Any = 1) -> Any:
        return self.rank.index, value, scale

    @remote_method(Mode.MEGATRON_PP_AS_DP)
    def megatron_pp_as_dp(self, value: Any, scale: Any = 1) -> Any:
        return self.rank.index, value, scale

    @remote_method(Mode.MEGATRON_PP_ONLY)
    def megatron_pp_only(self, value: Any, scale: Any = 1) -> Any:
        return self.rank.index, value, scale

    @remote_method(Mode.DP_COMPUTE_PROTO)
    def dp_compute_proto(self, batch: Batch) -> Batch:
        return self._doubled(batch)

    @remote_method(Mode.MEGATRON_COMPUTE_PROTO)
    def megatron_compute_proto(self, batch: Batch) -> Batch:
        return self._doubled(batch)

    @remote_method(Mode.MEGATRON_PP_AS_DP_PROTO)
    def megatron_pp_as_dp_proto(self, batch: Batch) -> Batch:
        return self._doubled(batch)

    @remote_method(Mode.DP_COMPUTE_PROTO_WITH_FUNC)
    def dp_compute_proto_with_func(self, function: Callable[[Batch], Batch], batch: Batch) -> Batch:
        return function(batch)

    @remote_method(Mode.DP_COMPUTE_METRIC)
    def dp_compute_metric(self, batch: Batch) -> dict[str, int]:
        return self._counted(batch)

    @remote_method(Mode.DIRECT_ROLLOUT_METHOD)
    def direct(self, value: Any) -> Any:
        return self.rank.index, value

    @remote_method(Custom(deal, concat))
    def dealt(self, values: list[int]) -> list[int]:
        return values

    @remote_method(Custom(deal_one_less, concat))
    def dealt_wrongly(self, values: list[int]) -> list[int]:
        return values

    @remote_method(dispatch={"batch": Shard(), "other": Shard()}, collect=concat)
    def two(self, batch: Batch, other: Batch | None = None, scale: int = 1) -> Batch:
        together = batch if other is None else batch.union(other)
        return Batch(columns={"sum": sum(together.columns[n] for n in ("number", "more") if n in together.names)})

    @remote_method(dispatch={"batch": Shard(), "other": Shard(uneven="allow")})
    def two_kinds(self, batch: Batch, other: Batch) -> None: ...

    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def marked(self, batch: Batch) -> Batch:
        """Other rows than it was given, with their mark."""
        return batch.repeat(2).select(batch.repeat(2)["number"] >= 0)

    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def unmarked(self, batch: Batch) -> Batch:
        return Batch(columns={"number": batch.repeat(2)["number"]})

    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def listed(self, batch: Batch) -> list[str]:
        return batch["text"]

    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def as_array(self, batch: Batch) -> Any:
        return batch["number"]

    @remote_method(dispatch={"batch": Shard()})
    def batches(self, batch: Batch) -> Batch:
        return batch

    @remote_method(dispatch={"batch": Shard()})
    def lists(self, batch: Batch) -> list[str]:
        return ["of the rank"] * len(batch)

    @remote_method(dispatch={"batch": Shard(uneven="refuse")}, collect=concat)
    def even(self, batch: Batch) -> Batch:
        return batch

    @remote_method(dispatch={"batch": Shard(uneven="allow")}, collect=reduce(add))
    def total(self, batch: Batch, weight: float = 1.0) -> dict[str, float]:
        return {"sum": float(batch["number"].sum()) * weight, "n": float(len(batch))}

    @remote_method(dispatch={"batch": Shard()}, collect=reduce(add))
    def weighted_total(self, batch: Batch) -> dict[str, float]:
        return {"sum": float(batch["number"][~batch.is_padding].sum())}

    @remote_method(dispatch={"value": Broadcast(), "own": PerRank()})
    def declared(self, value: Any, own: Any) -> Any:
        return value, own

    @remote_method(execute=Execute.RANK_ZERO)
    def lead(self, value: Any = None) -> Any:
        return self.rank.index, value

    @remote_method(collect=concat)
    def not_rows(self) -> Any:
        return self.rank.index

    @remote_method(collect=concat)
    def unlike(self) -> Any:
        return [] if self.rank.index else ()

    @remote_method()
    def fail(self, rank: int, kind: str) -> int:
        if rank != self.rank.index:
            return self.rank.index
        match kind:
            case "value":
                raise ValueError(f"rank {rank} of {self.rank.size} does not like it")
            case "hopeless":
                raise Hopeless("nothing helps")
            case _:
                raise Unpicklable(1, two=2)

    @remote_method()
    def unsendable(self) -> Any:
        return threading.Lock()

    @remote_method(blocking=False)
    def held(self, gate: Path, rank: int, value: Any = None) -> Any:
        """On one rank: read what is written to the gate, a named pipe, until it is closed."""
        if rank == self.rank.index:
            with gate.open() as pipe:
                pipe.read()
        self.log.append(value)
        return value

    @remote_method(blocking=False)
    def miss(self, gate: Path, rank: int) -> None:
        """Every rank misses one rank, which waits at the gate."""
        if rank != self.rank.index:
            raise PeerMissed(f"rank {self.rank.index} misses rank {rank}")
        with gate.open() as pipe:
            pipe.read()

    @remote_method(blocking=False, timeout=0.05)
    def held_too_long(self, gate: Path, rank: int) -> Any:
        if rank == self.rank.index:
            with gate.open() as pipe:
                pipe.read()
        return self.rank.index

    @remote_method(blocking=False)
    def note(self, value: Any) -> Any:
        self.log.append(value)
        return value

    @remote_method()
    def noted(self) -> list[Any]:
        log, self.log = self.log, []
        return log

    @remote_method()
    def leave(self, rank: int, code: int) -> None:
        if rank == self.rank.index:
            os._exit(code)

    def _doubled(self, batch: Batch) -> Batch:
        return doubled(batch)

    def _counted(self, batch: Batch) -> dict[str, int]:
        return {"rows": len(batch), "samples": int((~batch.is_padding).sum())}


class Later(Probe):
    """The same methods, and none of them is waited for."""


def _later(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Probe, **arguments: Any) -> Any:
        return method(self, **arguments)

    call.__remote_method__ = replace(method.__remote_method__, blocking=False)  # type: ignore[attr-defined]
    return call


for _name in remote_methods(Probe):
    setattr(Later, _name, _later(getattr(Probe, _name)))


class NoMesh:
    def __init__(self, rank: Rank) -> None: ...

    @remote_method(Mode.MEGATRON_COMPUTE)
    def update(self, value: Any) -> Any: ...


class Actor:
    """Roles of one run. They keep their number to themselves, unless one that shares its process asks."""

    def __init__(self, rank: Rank, number: float, roles: Mapping[str, Any]) -> None:
        self.rank, self.number, self.roles = rank, number, roles

    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def update(self, batch: Batch) -> Batch:
        return Batch(columns={"number": batch["number"] * self.number})

    @remote_method()
    def beside(self) -> list[str]:
        return sorted(self.roles)

    @remote_method()
    def of(self, role: str) -> float:
        number: float = self.roles[role].number
        return number


class Critic(Actor):
    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def update(self, batch: Batch) -> Batch:
        return Batch(columns={"number": batch["number"] + self.number})
