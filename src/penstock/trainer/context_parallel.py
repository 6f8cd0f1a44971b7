"""Ranks that share every pass (context parallelism in the form of DeepSpeed-Ulysses, arXiv 2309.14509).

Each rank of a group computes a run of the tokens of a packed row. Only attention looks at other tokens: for it each
rank gets all tokens of some heads, and gives the results back. Keys and values with fewer heads than ranks are sent to
several ranks.

Finally each rank gets the values of the other ranks' trained tokens, because objectives need whole samples. So all
ranks of a group compute the same loss, and each one's gradient is that of its own tokens. Their sum over the ranks is
the whole gradient, as it is for samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor

from penstock.trainer.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Context:
    """The group of ranks with which a rank shares its passes."""

    size: int
    index: int
    """Of this rank in the group."""
    group: distributed.ProcessGroup

    @property
    def is_first(self) -> bool:
        """Return whether this rank counts what the group has computed."""
        return self.index == 0

    def by_heads(self, values: Tensor) -> Tensor:
        """Return all tokens of this rank's heads, from its own tokens of all heads.

        [num_heads, num_tokens, width] -> [num_heads / size, num_tokens * size, width], or one head if there are fewer
        heads than ranks.
        """
        if len(values) < self.size:
            values = values.repeat_interleave(self.size // len(values), dim=0)
        heads, tokens, width = len(values) // self.size, values.shape[1], values.shape[2]
        parts = self._exchanged(values.reshape(self.size, heads, tokens, width))  # [source of the tokens, ...]
        return parts.transpose(0, 1).reshape(heads, self.size * tokens, width)

    def by_tokens(self, values: Tensor) -> Tensor:
        """Return this rank's tokens of all heads, from all tokens of its heads: the way back of `by_heads`."""
        heads, tokens, width = len(values), values.shape[1] // self.size, values.shape[2]
        parts = self._exchanged(values.reshape(heads, self.size, tokens, width).transpose(0, 1))
        return parts.reshape(self.size * heads, tokens, width)

    def gathered(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the values of all ranks, [sum(counts), ...], from this rank's, [counts[index], ...]."""
        found: Tensor = _Gather.apply(own, self, tuple(counts))  # type: ignore[no-untyped-call]
        return found

    def _exchanged(self, parts: Tensor) -> Tensor:
        """Give part i to rank i, and return the parts that the ranks have for this one, [size, ...] -> [size, ...]."""
        found: Tensor = _Exchange.apply(parts, self)  # type: ignore[no-untyped-call]
        return found


class _Exchange(torch.autograd.Function):
    """Its gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, context: Context) -> Tensor:
        ctx.context = context
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        distributed.all_to_all_single(received, parts, group=context.group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Exchange.forward(ctx, gradient, ctx.context), None


class _Gather(torch.autograd.Function):
    """Every rank has the gradients of all values, and takes those of its own."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: Context, counts: tuple[int, ...]) -> Tensor:
        ctx.start, ctx.count = sum(counts[: context.index]), counts[context.index]
        sent = own.new_zeros(max(counts), *own.shape[1:])
        sent[: len(own)] = own
        received = [torch.empty_like(sent) for _ in range(context.size)]
        distributed.all_gather(received, sent, group=context.group)
        return torch.cat([part[:count] for part, count in zip(received, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[ctx.start : ctx.start + ctx.count], None, None


def context_of(ranks: Ranks, size: int) -> Context | None:
    """Return this rank's group of `size` neighbouring ranks, which share their passes; None if it is alone. All ranks
    must call this."""
    if size == 1:
        return None
    return Context(size, ranks.index % size, ranks.group(size))
