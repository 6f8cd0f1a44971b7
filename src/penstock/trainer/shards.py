"""Convert between sharded tensors (DTensor: every rank holds a part), whole tensors, and files.

A shard is a run of rows: rank i of n holds the i-th of n chunks along the first dimension, as `torch.chunk` cuts them,
or nothing. A sharded state is saved as one file per rank. Any number of ranks can read the files; they join the shards
one tensor at a time. All functions accept whole tensors too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.utils._pytree import tree_map

from penstock.config import ConfigError
from penstock.ticks import tick

SHARDS = "shards"
"""Dimension of the mesh of ranks along which tensors are sharded."""
ROWS = "rows"
"""The only key of a mapping that stands for a shard in a file."""
ALIGNED_BYTES = 64
PROBE_BYTES = 1 << 20
"""Size of a trial write after a failed save: its OSError names the reason, which torch does not report."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor as stored in files: the rows of each rank, in rank order."""

    shards: list[Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(shard) for shard in self.shards), *self.shards[0].shape[1:])

    def whole(self) -> Tensor:
        return torch.cat(self.shards)

    def rows(self, start: int, stop: int) -> Tensor:
        """Return a copy of rows `start` to `stop`. Nothing else is read."""
        found, first = [], 0
        for shard in self.shards:
            found.append(shard[max(start - first, 0) : max(stop - first, 0)])
            first += len(shard)
        return torch.cat(found)


class WeightRows(NamedTuple):
    """A run of rows of a weight."""

    name: str
    first_row: int
    rows: Tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor. If it is sharded, all ranks must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def first_row(tensor: Tensor) -> int:
    """Return the number of the first row of this rank's part of a tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    shards = tensor.device_mesh[SHARDS]
    return shards.get_local_rank() * -(-tensor.shape[0] // shards.size())


def assign(target: Tensor, value: Tensor | Saved) -> None:
    """Copy `value` into `target`, or this rank's part of it into this rank's shard."""
    placed = like(value, target)
    with torch.no_grad():
        if isinstance(target, DTensor):
            target.to_local().copy_(placed.to_local())
        else:
            target.copy_(placed)


def like(value: Tensor | Saved, model: Tensor) -> Any:
    """Return `value` sharded like `model`, which has the same shape."""
    if not isinstance(model, DTensor):
        return value.whole() if isinstance(value, Saved) else value
    if isinstance(value, DTensor):
        return value.redistribute(model.device_mesh, model.placements)
    start = first_row(model)
    num_rows = -(-value.shape[0] // model.device_mesh[SHARDS].size())
    mine = value.rows(start, start + num_rows) if isinstance(value, Saved) else value[start : start + num_rows]
    local = mine.to(model.device, model.dtype).contiguous()
    return DTensor.from_local(local, model.device_mesh, model.placements, shape=model.shape, stride=model.stride())


def load_parameters(module: Module, weights: Mapping[str, Tensor | Saved]) -> None:
    """Copy `weights` into the parameters. Raises KeyError if one is missing."""
    for name, parameter in module.named_parameters():
        assign(parameter, weights[name])


def own_part(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return this rank's part of a state: its rows of sharded tensors, and everything else. The tensors share the
    memory of the state. They keep it if a module moves to another device later."""

    def part(value: Any) -> Any:
        if isinstance(value, DTensor):
            return {ROWS: value.to_local()}
        return value.detach() if isinstance(value, Tensor) else value

    own: dict[str, Any] = tree_map(part, state)
    return own


def write_state(own: Mapping[str, Any], directory: Path, name: str, *, shard: int, num_shards: int) -> None:
    """Write this rank's part of a state (`own_part`) to `directory`, which all ranks share. Raises OSError on a full
    disk. Each tensor is a tick of progress.

    A state holds only tensors and plain values, so that it loads with `weights_only`. Shard 0 goes to `<name>.pt`, with
    what is not sharded. Shard i goes to `<name>_<i>.pt`.
    """
    own = {**own, "num_files": num_shards}
    file = directory / _file_of(name, shard)
    try:
        with file.open("wb") as opened:
            torch.save(own, _Ticking(opened))  # type: ignore[arg-type] # it has what torch uses
    except RuntimeError:
        with file.open("ab", buffering=0) as opened:  # torch does not report a full disk; this write does
            opened.write(bytes(PROBE_BYTES))
        raise


def read_state(directory: Path, name: str) -> dict[str, Any]:
    """Return the whole state that `write_state` wrote with any number of ranks: a `Saved` per sharded tensor.

    Raises `ConfigError` if absent.
    """
    if not (directory / _file_of(name, 0)).exists():
        raise ConfigError(f"{directory} has no file {_file_of(name, 0)}: it is no checkpoint, or one without {name}")

    def load(rank: int) -> dict[str, Any]:
        file = directory / _file_of(name, rank)
        loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        return loaded

    files = [load(0)]
    files += [load(rank) for rank in range(1, files[0]["num_files"])]

    def join(*values: Any) -> Any:
        return Saved([value[ROWS] for value in values]) if _is_rows(values[0]) else values[0]

    state: dict[str, Any] = tree_map(join, *files, is_leaf=_is_rows)
    return state


def joined(weights: Mapping[str, Tensor | Saved], file: Path) -> dict[str, Tensor]:
    """Return whole tensors. Their memory is the new `file`, so main memory needs no room for all of them. Raises
    OSError on a full disk."""
    sizes = [(math.prod(each.shape), _dtype(each)) for each in weights.values()]
    num_bytes = [-(-number * dtype.itemsize // ALIGNED_BYTES) * ALIGNED_BYTES for number, dtype in sizes]
    with file.open("wb") as opened:
        os.posix_fallocate(opened.fileno(), 0, max(sum(num_bytes), 1))  # a missing page would be a SIGBUS later
    memory = torch.from_file(str(file), shared=True, size=sum(num_bytes), dtype=torch.uint8)
    made = {}
    parts = zip(weights.items(), sizes, torch.split(memory, num_bytes), strict=True)
    for (name, value), (number, dtype), part in parts:
        tensor = part[: number * dtype.itemsize].view(dtype).view(value.shape)
        if isinstance(value, Saved):
            torch.cat(value.shards, out=tensor)
        else:
            tensor.copy_(value)
        made[name] = tensor
        tick()
    return made


def _dtype(value: Tensor | Saved) -> torch.dtype:
    return value.shards[0].dtype if isinstance(value, Saved) else value.dtype


class _Ticking:
    """A file. Every write is a tick of progress."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        tick()
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def _file_of(name: str, rank: int) -> str:
    return f"{name}_{rank}.pt" if rank else f"{name}.pt"


def _is_rows(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {ROWS}
