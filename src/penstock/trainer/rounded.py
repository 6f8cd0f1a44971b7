"""Passes in a smaller dtype than float32. The trained weights stay float32, and passes use rounded copies of them.

The copies are the leaves of the backward pass. As soon as a copy has its gradient, it is added to the gradient of the
float32 weight. So gradients add up in float32 over micro-batches, and optimizer, checkpoints and publishing know only
the float32 weights. FSDP does the same for shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class Rounded:
    """Rounded copies of the trained weights of a model."""

    def __init__(self, module: Module, dtype: torch.dtype, *, precise: Sequence[Module] = ()) -> None:
        """Round the frozen weights of `module` to `dtype`, in place. `precise`: parts that keep float32 weights."""
        kept = {parameter for part in precise for parameter in part.parameters()}
        self._places = [
            (part, name, weight)
            for part in module.modules()
            for name, weight in part._parameters.items()
            if weight is not None and weight.requires_grad and weight not in kept
        ]
        self._weights = list(dict.fromkeys(weight for *_, weight in self._places))  # tied weights once
        self._dtype = dtype
        self._copies: dict[Parameter, Parameter] = {}
        """By weight; empty until they are needed."""
        self._is_current = self._is_used = False
        round_frozen(module, dtype, kept=kept)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the model compute with the copies during the body, which has both the forward and the backward pass."""
        if not self._is_current:
            self._renew()
        for part, name, weight in self._places:
            part._parameters[name] = self._copies[weight]
        self._is_used = True
        try:
            yield
        finally:
            self._is_used = False
            for part, name, weight in self._places:
                part._parameters[name] = weight

    def changed(self) -> None:
        """Note that the weights have changed, also during the body of `in_use`. Tensors do not tell: fused optimizers
        leave their version counters as they are."""
        self._is_current = False
        if self._is_used:
            self._renew()

    def forget(self) -> None:
        """Free the memory of the copies until they are needed."""
        self._copies, self._is_current = {}, False

    def _renew(self) -> None:
        if not self._copies:
            self._copies = {weight: self._copy_of(weight) for weight in self._weights}
        copies = [self._copies[weight].data for weight in self._weights]  # `data`: see `policy_copy.Exchange`
        if copies:
            torch._foreach_copy_(copies, [weight.detach() for weight in self._weights])
        self._is_current = True

    def _copy_of(self, weight: Parameter) -> Parameter:
        copied: Any = Parameter(torch.empty_like(weight, dtype=self._dtype))
        copied.register_post_accumulate_grad_hook(lambda own: _add_gradient(own, weight))
        rounded: Parameter = copied
        return rounded


def round_frozen(module: Module, dtype: torch.dtype, *, kept: Collection[Parameter] = ()) -> None:
    """Round the frozen weights of a module to `dtype`, in place, except the `kept` ones. Buffers stay as they are."""
    for parameter in module.parameters():
        if not parameter.requires_grad and parameter not in kept:
            parameter.data = parameter.data.to(dtype)


def _add_gradient(copied: Tensor, weight: Parameter) -> None:
    gradient, copied.grad = copied.grad, None
    assert gradient is not None
    if weight.grad is None:
        weight.grad = gradient.to(weight.dtype)
    else:
        weight.grad.add_(gradient)
