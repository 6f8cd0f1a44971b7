"""Checks that the slot engine can serve a Hugging Face model. They run when the engine is built."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from transformers import PreTrainedModel

from penstock.model.load_policy import FULL, attention_kinds


def check_model(model: PreTrainedModel, max_context: int) -> None:
    """Raise ValueError if the engine would compute the model's attention wrongly."""
    config = model.config.get_text_config()
    name = type(model).__name__
    kinds = attention_kinds(config)
    if kinds != {FULL}:
        raise ValueError(f"{name} has layers of type {', '.join(sorted(kinds))}; the slot engine serves full attention")
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not support custom attention functions of Transformers")
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and max_context > longest:
        raise ValueError(f"a context of {max_context} tokens exceeds the {longest} positions of {name}")


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids of the model's end-of-sequence tokens."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = model.config.eos_token_id if ids is None else ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def fit_tensors(
    parameters: Mapping[str, torch.Tensor], tied: Collection[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the given weights in the model's dtype, without the additional names in `tied`.

    Raises ValueError for a name or a shape that the model does not have."""
    fitted = {}
    for name, tensor in tensors.items():
        if name in tied:
            continue
        if name not in parameters:
            raise ValueError(f"weight {name} is unknown to the model")
        if tensor.shape != parameters[name].shape:
            given, expected = tuple(tensor.shape), tuple(parameters[name].shape)
            raise ValueError(f"weight {name} has shape {given} instead of {expected}")
        fitted[name] = tensor.to(parameters[name].dtype)
    return fitted
