"""Tensors of which every rank holds a part (DTensor), and tensors that are whole: from one to the other, and to files.

A shard is a run of rows: rank i of n holds the i-th of n chunks along the first dimension, as `torch.chunk` cuts them,
or nothing. A state that is sharded is saved as one file per rank; read together, the files are whole again, however
many ranks read them, and one tensor at a time. Everything here takes whole tensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

ROWS = "rows"
"""The only key of a mapping that stands for a shard in a file."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor as files hold it: the rows of each rank, in their order."""

    shards: list[Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(len(shard) for shard in self.shards), *self.shards[0].shape[1:])

    def whole(self) -> Tensor:
        return torch.cat(self.shards)


def whole(tensor: Tensor) -> Tensor:
    """All of it. Where it is sharded, every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assign(target: Tensor, value: Tensor | Saved) -> None:
    """Make `target`, or this rank's part of it, what `value` is."""
    placed = like(value, target)
    with torch.no_grad():
        if isinstance(target, DTensor):
            target.to_local().copy_(placed.to_local())
        else:
            target.copy_(placed)


def like(value: Tensor | Saved, model: Tensor) -> Any:
    """`value` laid over the ranks as `model` is, whose shape it has."""
    if isinstance(value, Saved):
        value = value.whole()
    if not isinstance(model, DTensor):
        return value
    if isinstance(value, DTensor):
        return value.redistribute(model.device_mesh, model.placements)
    chunks, rank = value.chunk(model.device_mesh.size()), model.device_mesh.get_local_rank()
    mine = chunks[rank] if rank < len(chunks) else value[:0]
    return DTensor.from_local(
        mine.to(model.device, model.dtype).contiguous(),
        model.device_mesh,
        model.placements,
        shape=model.shape,
        stride=model.stride(),
    )


def load_module(module: Module, state: Mapping[str, Tensor | Saved]) -> None:
    """Make parameters and buffers what was saved, whole. Raises KeyError for one that was not."""
    for name, tensor in module.state_dict().items():
        assign(tensor, state[name])


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Go back to a saved state, whole: moments come to lie as their parameters do. Takes copies: what was saved may
    be mapped files."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = {
        number: {
            name: (like(value, parameters[number]) if value.shape == parameters[number].shape else value).clone()
            for name, value in of_one.items()
        }
        for number, of_one in state["state"].items()
    }
    optimizer.load_state_dict({"state": moments, "param_groups": state["param_groups"]})
    optimizer.zero_grad(set_to_none=True)


def to_file(state: Any) -> Any:
    """What of a tree of dicts, lists and values this rank saves: its rows of what is sharded."""
    return _walk([state], lambda values: {ROWS: values[0].to_local()} if isinstance(values[0], DTensor) else values[0])


def from_files(states: Sequence[Any]) -> Any:
    """The whole state, from what each rank saved, in their order: a `Saved` where it was sharded, else rank 0's."""
    return _walk(states, lambda values: Saved([v[ROWS] for v in values]) if _is_rows(values[0]) else values[0])


def _walk(trees: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    first = trees[0]
    if isinstance(first, Mapping) and not _is_rows(first):
        return {key: _walk([tree[key] for tree in trees], join) for key in first}
    if isinstance(first, list | tuple):
        return [_walk(list(items), join) for items in zip(*trees, strict=True)]
    return join(list(trees))


def _is_rows(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {ROWS}
