"""The experts of a model (mixture of experts): where its layers hold them, and how many parameters compute a token."""

from __future__ import annotations

from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel

from penstock.model.files import NUM_EXPERTS

PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
"""Names that architectures give the number of experts that compute a token."""
OF_INTERFACE = {"num_experts", "has_gate", "is_transposed"}
"""Attributes of a module whose experts Transformers computes through its `ExpertsInterface`."""


def experts_of(model: Module) -> list[Any]:
    """Return the parts of a model that hold all experts of a layer, one tensor [num_experts, ...] for each weight, and
    that Transformers computes through its `ExpertsInterface`."""
    return [part for part in model.modules() if vars(part).keys() >= OF_INTERFACE]


def num_experts(model: PreTrainedModel) -> int:
    """Return the number of experts of a layer, as the model's configuration says. 0 if it has none."""
    config = model.config.get_text_config()
    return next((int(found) for name in NUM_EXPERTS if (found := getattr(config, name, None))), 0)


def per_token(model: PreTrainedModel) -> int:
    """Return the number of experts of a layer that compute a token, as the model's configuration says. If it says
    nothing, that is all of them."""
    config = model.config.get_text_config()
    named = (getattr(config, name, None) for name in PER_TOKEN)
    return next((found for found in named if isinstance(found, int) and found), num_experts(model))


def num_active(model: PreTrainedModel) -> int:
    """Return the number of parameters that compute a token: all but those of experts that it is not sent to."""
    idle = 0
    for part in experts_of(model):
        held = sum(parameter.numel() for parameter in part.parameters(recurse=False))
        idle += held * max(part.num_experts - per_token(model), 0) // part.num_experts
    return sum(parameter.numel() for parameter in model.parameters()) - idle
