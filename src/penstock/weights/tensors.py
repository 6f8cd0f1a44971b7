"""Tensors as transfers carry them: names, dtypes and shapes beside, the bytes end to end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.types import TensorNames
from penstock.weights.shared_memory import Layout

DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
}
"""What weights may come in; anything shorter means nothing without its scales."""
MAX_DIMENSIONS = 64


class Spec(NamedTuple):
    """One announced tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def announce(named: Mapping[str, Tensor]) -> TensorNames:
    """What a receiver must be told of `named`, in their order."""
    return TensorNames(
        names=list(named),
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in named.values()],
        shapes=[list(tensor.shape) for tensor in named.values()],
    )


def specs(announced: TensorNames, *, max_bytes: int) -> list[Spec]:
    """Raises ValueError for an announcement that contradicts itself or is longer than `max_bytes`."""
    if not len(announced.names) == len(announced.dtypes) == len(announced.shapes):
        counts = f"{len(announced.names)} names, {len(announced.dtypes)} dtypes and {len(announced.shapes)} shapes"
        raise ValueError(f"every tensor has a name, a dtype and a shape, but there are {counts}")
    if not announced.names:
        raise ValueError("no tensors are announced")
    if len(set(announced.names)) < len(announced.names):
        raise ValueError("a tensor is announced twice")
    found = [
        Spec(name, _dtype(name, dtype), _shape(name, shape, max_bytes))
        for name, dtype, shape in zip(announced.names, announced.dtypes, announced.shapes, strict=True)
    ]
    if (num_bytes := sum(spec.num_bytes for spec in found)) > max_bytes:
        raise ValueError(f"{num_bytes} bytes are announced, but this model takes at most {max_bytes}")
    return found


def max_chunk_bytes(layout: Layout) -> int:
    """More than any sender needs: the whole model in float64, its tied weights under two names."""
    return 2 * 8 * sum(prod(shape) for shape, _ in layout.values())


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, end to end."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def unflatten(flat: Tensor, wanted: Sequence[Spec]) -> dict[str, Tensor]:
    """Copies out of `flat`, as long as it is; each aligned for its dtype."""
    ends = accumulate(spec.num_bytes for spec in wanted)
    return {
        spec.name: flat[end - spec.num_bytes : end].clone().view(spec.dtype).reshape(spec.shape)
        for spec, end in zip(wanted, ends, strict=True)
    }


def buckets(named: Mapping[str, Tensor], num_bytes: int) -> Iterator[dict[str, Tensor]]:
    """`named` in pieces of at most `num_bytes`, but for a single tensor that is larger."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named.items():
        if bucket and size + tensor.nbytes > num_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def _dtype(name: str, text: str) -> torch.dtype:
    try:
        return DTYPES[text.removeprefix("torch.")]
    except KeyError:
        raise ValueError(f"tensor {name} has dtype {text!r}: send {', '.join(DTYPES)}") from None


def _shape(name: str, shape: Sequence[int], max_bytes: int) -> tuple[int, ...]:
    # Sizes that a product with 0 hides are beyond torch too.
    sizes = tuple(shape[: MAX_DIMENSIONS + 1])
    possible = len(sizes) <= MAX_DIMENSIONS and all(0 <= size <= max_bytes for size in sizes)
    if not possible or prod(max(size, 1) for size in sizes) > max_bytes:
        raise ValueError(f"tensor {name} has shape {str(sizes)[:100]}, but this model takes at most {max_bytes} bytes")
    return sizes
