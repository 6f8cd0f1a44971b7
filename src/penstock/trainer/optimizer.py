"""The optimizer of policy, critic and warm start."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import AdamW

from penstock.trainer.shards import like, whole


def adamw(parameters: Sequence[Parameter], *, weight_decay: float = 0.0) -> AdamW:
    """Return an AdamW with the fastest kernels for the device: fused on CUDA, else foreach."""
    fused = parameters[0].device.type == "cuda"
    return AdamW(parameters, weight_decay=weight_decay, foreach=not fused, fused=fused)


def take_step(optimizer: AdamW, *, learning_rate: float, max_grad_norm: float) -> float:
    """Clip the gradients, apply them and drop them. Return their norm before clipping.

    If the norm is not finite, weights and optimizer stay unchanged.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm, foreach=True)))
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def load_optimizer(optimizer: AdamW, state: Mapping[str, Any]) -> None:
    """Restore the complete optimizer state, with moments sharded like their parameters.

    The tensors are copied, since saved tensors may be mapped from files.
    """
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
