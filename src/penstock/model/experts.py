"""The experts of a model (mixture of experts): its layers that have them, the ones that routers choose, and how many
parameters compute a token.

Every such layer of Transformers calls its experts as `experts(hidden_states, chosen, weights)`. So this knows no
architecture, but the names of the second argument.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from penstock.model.files import EXPERTS_PER_TOKEN, NUM_EXPERTS
from penstock.routed_experts import Record, dtype_of

CHOSEN = ("top_k_index", "router_indices")
"""Names of the second argument of experts: the numbers of the chosen ones, [num_tokens, k]."""
OF_INTERFACE = {"num_experts", "has_gate", "is_transposed"}
"""Attributes of a module whose experts Transformers computes through its `ExpertsInterface`."""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer with experts."""

    number: int
    """Of the layer in the model, with those that have no experts."""
    block: Module
    """The parent of the experts, which has the router too."""
    experts: Module
    num_experts: int


def expert_layers(model: Module) -> list[ExpertLayer]:
    """Return the layers with experts, in order; none for a dense model."""
    found = list[ExpertLayer]()
    for name, block in model.named_modules():
        for experts in block.children():
            if any(argument in CHOSEN for argument in inspect.signature(experts.forward).parameters):
                number = re.search(r"\.(\d+)(\.|$)", f".{name}")
                sizes = [parameter.shape[0] for parameter in experts.parameters() if parameter.dim() == 3]
                if sizes:
                    found.append(ExpertLayer(int(number[1]) if number else len(found), block, experts, sizes[0]))
    return found


@contextmanager
def recording(layers: list[ExpertLayer]) -> Iterator[list[Tensor]]:
    """Yield a list that gets the experts [num_tokens, k] which each layer computes in the body."""
    found: list[Tensor] = []

    def note(_: Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.append(given[1] if len(given) > 1 else next(named[name] for name in CHOSEN if name in named))

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(layer.experts.register_forward_pre_hook(note, with_kwargs=True))
        yield found


def record_of(chosen: list[Tensor], num_experts: int) -> Record:
    """Return what `recording` has found in one pass as a record."""
    rows = torch.stack(chosen, dim=1).flatten(1)
    return rows.cpu().numpy().astype(dtype_of(num_experts))


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
    named = (getattr(config, name, None) for name in EXPERTS_PER_TOKEN)
    return next((found for found in named if isinstance(found, int) and found), num_experts(model))


def num_active(model: PreTrainedModel) -> int:
    """Return the number of parameters that compute a token: all but those of experts that it is not sent to."""
    idle = 0
    for part in experts_of(model):
        held = sum(parameter.numel() for parameter in part.parameters(recurse=False))
        idle += held * max(part.num_experts - per_token(model), 0) // part.num_experts
    return sum(parameter.numel() for parameter in model.parameters()) - idle
