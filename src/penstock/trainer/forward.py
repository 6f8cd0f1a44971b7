"""The forward pass of any Hugging Face causal language model over a micro-batch."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from penstock.config import ConfigError
from penstock.model.experts import num_active
from penstock.model.load_policy import FULL, attention_kinds
from penstock.trainer import packed_attention
from penstock.trainer.output_layer import OutputLayer, gathered, needs_chunks
from penstock.trainer.packing import PASS_COST_TOKENS, MicroBatch
from penstock.trainer.router_replay import force

LAUNCH_FLOPS = 50 * 10**12
"""Compute of an accelerator during the time that it takes to launch the kernels of a forward and a backward pass: 170
ms for 28 layers, at 300 TFLOP/s. For a small model this equals more tokens than for a large model."""


def token_logprobs(model: PreTrainedModel, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities, entropies) of the micro-batch's trained tokens, both [N] in float32.

    The logits of many tokens are never all in memory, if the model allows that (see `OutputLayer`). Scales and caps
    are then computed in float32.
    """
    vocab = int(model.config.get_text_config().vocab_size)
    layer = OutputLayer.of(model) if needs_chunks(len(micro.chosen), vocab) else None
    if layer is None:
        found = token_statistics(token_logits(model, micro), micro.chosen, temperature=micro.temperature)
    else:
        found = _in_chunks(model, layer, micro)
    logprobs, entropies = map(micro.of_all_tokens, found)
    return logprobs, entropies


def token_statistics(
    logits: Tensor,  # [num_tokens, vocab]
    chosen: Tensor,  # [num_tokens], token ids
    *,
    temperature: float | Tensor = 1.0,  # of all tokens, or [num_tokens]
) -> tuple[Tensor, Tensor]:
    """Return (log pi(chosen), H(pi)), both [num_tokens] in float32, with pi = softmax(logits / temperature).

    H = -sum_v pi(v) log pi(v) over the whole vocabulary, in nats; it carries no gradient.
    """
    divisor = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) else temperature
    return gathered(
        logits.float() if isinstance(divisor, float) and divisor == 1.0 else logits.float() / divisor, chosen
    )


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Return whether a prompt's keys and values can be computed once, with gradients, for several continuations.

    This needs full attention in every layer: windows and recurrent states do not split at an arbitrary column.
    """
    full = attention_kinds(model.config.get_text_config()) == {FULL}
    cached = not getattr(model, "_is_stateful", False) and not model.is_activation_checkpointing
    return full and cached and _accepts(model, "logits_to_keep") and _accepts(model, "position_ids")


def pass_cost(model: PreTrainedModel, device: torch.device) -> int:
    """Return the fixed cost, in tokens, of one more forward and backward pass of a micro-batch on `device`."""
    if device.type == "cpu":
        return PASS_COST_TOKENS
    return max(LAUNCH_FLOPS // (6 * num_active(model)), PASS_COST_TOKENS)


def recompute_activations(model: PreTrainedModel, *, offload: bool = False) -> None:
    """Trade time for memory: compute activations again in the backward pass.

    What is kept for that are the inputs of the layers. With `offload` they wait in pinned main memory.

    Transformers layers recompute only in training mode. This function therefore sets training mode on the layers alone;
    their submodules, dropout above all, stay in eval mode as during sampling. Raises `ConfigError` for a layer with its
    own dropout.
    """
    enable: Any = model.activation_checkpointing_enable  # its annotations leave out `offload`
    enable({"use_reentrant": False, "preserve_rng_state": False}, offload=offload)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            own = {name: value for name, value in vars(layer).items() if "dropout" in name and value}
            if own:
                layer_type = type(layer).__name__
                raise ConfigError(f"trainer.activation_checkpointing: {layer_type} has a dropout of its own: {own}")
            layer.training = True


def token_logits(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Return the logits that predict the trained tokens, [N, vocab].

    The output layer gets only the trained tokens, if the model allows that. With a large vocabulary, the logits of the
    remaining tokens would need more memory than everything else. The model itself applies any later operation (caps,
    scales).
    """

    def select(_: Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return (_trained(given[0], micro),)

    inputs = _inputs(model, micro)
    head = _output_layer(model)
    with nullcontext() if head is None else head.register_forward_pre_hook(select):
        logits: Tensor = model(**inputs).logits
    return _trained(logits, micro)


def _in_chunks(model: PreTrainedModel, layer: OutputLayer, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return what `token_logprobs` does, without the logits of all tokens.

    The chunks are computed where the model calls its output layer, which then gets no token. They are the output of the
    whole model: a sharded model gathers its weights for the backward pass of its output.
    """
    found: list[tuple[Tensor, Tensor]] = []

    def compute(_: Module, given: tuple[Tensor]) -> tuple[Tensor]:
        hidden = _trained(given[0], micro)
        found.append(layer.statistics(hidden, micro.chosen, temperature=micro.temperature))
        return (hidden[:0],)

    def give(_: Module, given: Any, output: Any) -> tuple[Tensor, Tensor]:
        return found.pop()

    inputs = _inputs(model, micro)
    with layer.head.register_forward_pre_hook(compute), model.register_forward_hook(give, prepend=True):
        statistics: tuple[Tensor, Tensor] = model(**inputs)
    return statistics


def _inputs(model: PreTrainedModel, micro: MicroBatch) -> dict[str, Any]:
    """Return the model's arguments for a micro-batch, whose recorded experts are then in force."""
    if micro.boundaries is not None:
        packed_attention.check_packs(model.config)
        force(model, micro.experts)
        return {"input_ids": micro.inputs, **packed_attention.arguments(micro.boundaries)}
    prefix = _prefix(model, micro) if micro.prefixes.shape[1] else {"use_cache": False}
    force(model, micro.experts)
    return {"input_ids": micro.inputs, **prefix}


def _trained(values: Tensor, micro: MicroBatch) -> Tensor:
    """Return values of the trained tokens, [N, ...], from those of all tokens, [R, L, ...], or from themselves."""
    return values if values.dim() == 2 else values[micro.rows, micro.columns]


def _prefix(model: PreTrainedModel, micro: MicroBatch) -> dict[str, Any]:
    """Return the model arguments with which each row continues its prefix.

    They are the cached keys and values, the row's positions, and a mask over the padding. Gradients flow back through
    the cache, summed over the rows that share a prefix.
    """
    cache = DynamicCache(config=model.config)
    force(model, micro.prefix_experts)
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


def _output_layer(model: Any) -> Module | None:
    """Return the output layer if the model can do with the hidden states of some tokens. A place in `logits_to_keep`
    would do the same, but a mask waits for the device."""
    head = model.get_output_embeddings()
    is_own = head is not None and any(child is head for child in model.children())
    return head if is_own and _accepts(model, "logits_to_keep") else None


def _accepts(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters
