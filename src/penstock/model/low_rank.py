"""Low-rank adapters: how they change a weight, and their names in peft's files.

Trainer and engine add them to a weight in the same way, so that both compute with the same numbers.
"""

from __future__ import annotations

from torch import Tensor

PREFIX = "base_model.model."
"""Of all names in peft's files."""


def names_of(target: str) -> tuple[str, str]:
    """Return the names of A and B of the weight `target` in a file of adapters."""
    module = target.removesuffix(".weight")
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def change_of(a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
    """Return what adapters `a`, [rank, inputs], and `b`, [outputs, rank], add to a weight, [outputs, inputs]."""
    return (b @ a).mul_(alpha / len(a))


def merged(weight: Tensor, change: Tensor) -> Tensor:
    """Return a weight plus its float32 change, rounded once. The change is overwritten, which saves memory."""
    return change.add_(weight).to(weight.dtype)
