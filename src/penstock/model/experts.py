"""The layers of a model that have experts, and the experts that their routers choose.

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

from penstock.routed_experts import Record, dtype_of

CHOSEN = ("top_k_index", "router_indices")
"""Names of the second argument of experts: the numbers of the chosen ones, [num_tokens, k]."""


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
