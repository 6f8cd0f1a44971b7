"""What the slot engine needs of a Hugging Face model, checked when the engine is built."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from transformers import PreTrainedModel

from penstock.model.attention import FULL, attention_kinds
from penstock.rollout.slots import SlotCache


def check_model(model: PreTrainedModel, max_context: int) -> None:
    """Raise ValueError for a model whose attention the engine would compute wrongly."""
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


def make_cache(model: PreTrainedModel, num_slots: int, max_context: int) -> SlotCache:
    """KV slots in the model's shape, dtype and place."""
    config = model.config.get_text_config()
    num_heads = config.num_attention_heads
    return SlotCache(
        num_layers=config.num_hidden_layers,
        num_slots=num_slots + 1 if model.device.type == "cuda" else num_slots,  # padding is written to the last one
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
        max_context=max_context,
        dtype=model.dtype,
        device=model.device,
    )


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens with which the model ends an answer."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = model.config.eos_token_id if ids is None else ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def check_tensors(parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError unless `tensors` has every parameter in its shape. Further names (tied copies) may be there."""
    missing = sorted(parameters.keys() - tensors.keys())
    if missing:
        raise ValueError(f"the update lacks {len(missing)} weights, the first is {missing[0]}")
    for name, parameter in parameters.items():
        if tensors[name].shape != parameter.shape:
            given, expected = tuple(tensors[name].shape), tuple(parameter.shape)
            raise ValueError(f"weight {name} has shape {given} instead of {expected}")


def fit_tensors(
    parameters: Mapping[str, torch.Tensor], tied: Collection[str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Some of the model's weights, in the dtype it keeps them in; further names of `tied` weights are left out. Raises
    ValueError for a name or a shape that the model does not have."""
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
