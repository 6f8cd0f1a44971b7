"""One forward pass of any Hugging Face causal language model over a micro-batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock.config import ConfigError
from penstock.model.attention import FULL, attention_kinds
from penstock.trainer.buckets import PASS_COST_TOKENS
from penstock.trainer.losses.likelihood import token_statistics
from penstock.trainer.packing import MicroBatch

LAUNCH_FLOPS = 50 * 10**12
"""What an accelerator computes in the time that it takes to launch the kernels of a forward and a backward pass: 170 ms
for 28 layers, at 300 TFLOP/s. In a small model that is worth more tokens than in a large one."""

Autocast = Callable[[], AbstractContextManager[Any]]
"""Makes what a forward pass runs in: `torch.autocast` or nothing."""


def token_logprobs(model: PreTrainedModel, micro: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of the micro-batch's trained tokens, both [N] in float32."""
    logits = token_logits(model, micro)
    return token_statistics(logits, micro.chosen, temperature=temperature)


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether a prompt's keys and values can be computed once, with gradients, for several continuations.

    True for full attention in every layer; windows and recurrent states do not split at an arbitrary column.
    """
    full = attention_kinds(model.config.get_text_config()) == {FULL}
    cached = not getattr(model, "_is_stateful", False) and not model.is_activation_checkpointing
    return full and cached and _accepts(model, "logits_to_keep") and _accepts(model, "position_ids")


def pass_cost(model: PreTrainedModel, device: torch.device) -> int:
    """What one more forward and backward pass of a micro-batch on `device` costs beyond its tokens, in tokens."""
    if device.type == "cpu":
        return PASS_COST_TOKENS
    num_parameters: int = model.num_parameters()
    return max(LAUNCH_FLOPS // (6 * num_parameters), PASS_COST_TOKENS)


def recompute_activations(model: PreTrainedModel) -> None:
    """Trade time for memory: activations are computed again in the backward pass.

    Layers do so in training mode only, so that mode is theirs alone: everything within them, dropout above all, stays
    as it was when the policy sampled. A layer that drops out itself is refused.
    """
    model.activation_checkpointing_enable({"use_reentrant": False})
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            own = {name: value for name, value in vars(layer).items() if "dropout" in name and value}
            if own:
                layer_type = type(layer).__name__
                raise ConfigError(f"trainer.activation_checkpointing: {layer_type} has a dropout of its own: {own}")
            layer.training = True


def token_logits(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Logits that predict the trained tokens, [N, vocab].

    Models that offer `logits_to_keep` project only the trained tokens: with a large vocabulary the others' logits would
    dwarf everything else. Anything after that projection (caps, scales) stays the model's own.
    """
    if not _accepts(model, "logits_to_keep"):
        logits: Tensor = model(input_ids=micro.inputs, use_cache=False).logits
        return logits[micro.rows, micro.columns]
    kept = torch.zeros_like(micro.inputs, dtype=torch.bool)
    kept[micro.rows, micro.columns] = True
    prefix = _prefix(model, micro) if micro.prefixes.shape[1] else {"use_cache": False}
    found: Tensor = model(input_ids=micro.inputs, logits_to_keep=kept, **prefix).logits
    return found


def _prefix(model: PreTrainedModel, micro: MicroBatch) -> dict[str, Any]:
    """What lets each row continue its prefix: cached keys and values, its own positions, and a mask over the padding.

    Gradients flow back through the cache, summed over the rows that share a prefix.
    """
    cache = DynamicCache(config=model.config)
    model(input_ids=micro.prefixes, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_select_indices(micro.prefix_rows)
    widths = micro.prefix_widths[:, None]
    places = torch.arange(micro.prefixes.shape[1], device=widths.device)
    return {
        "past_key_values": cache,
        "use_cache": True,
        "position_ids": widths + torch.arange(micro.inputs.shape[1], device=widths.device),
        "attention_mask": torch.cat((places < widths, torch.ones_like(micro.inputs, dtype=torch.bool)), dim=1),
    }


def _accepts(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
