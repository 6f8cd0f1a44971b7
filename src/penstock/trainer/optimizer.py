"""The optimizer of policy, critic and warm start."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import Parameter


def adamw(parameters: Iterable[Parameter], *, learning_rate: float, weight_decay: float = 0.0) -> torch.optim.AdamW:
    """AdamW in as few passes over memory as the device has kernels for."""
    held = list(parameters)
    fused = held[0].device.type == "cuda"
    return torch.optim.AdamW(held, lr=learning_rate, weight_decay=weight_decay, foreach=not fused, fused=fused)
