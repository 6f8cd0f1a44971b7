"""One forward pass of any Hugging Face causal language model over a micro-batch."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from penstock.trainer.losses.likelihood import token_statistics
from penstock.trainer.packing import MicroBatch


def token_logprobs(model: PreTrainedModel, micro: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of the micro-batch's trained tokens, both [N] in float32."""
    logits = _logits(model, micro)
    return token_statistics(logits, micro.chosen, temperature=temperature)


def shares_prefixes(model: PreTrainedModel) -> bool:
    """Whether a prompt's keys and values can be computed once, with gradients, for several continuations.

    True for full attention in every layer; windows and recurrent states do not split at an arbitrary column.
    """
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or ()
    windowed = getattr(config, "sliding_window", None) is not None and not layers
    stateful = getattr(model, "_is_stateful", False)
    return _keeps_logits(model) and not windowed and not stateful and all(kind == "full_attention" for kind in layers)


def _logits(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Logits that predict the trained tokens, [N, vocab].

    Models that offer `logits_to_keep` project only the columns where some row is trained: with a large vocabulary the
    prompt's logits would dwarf everything else. Anything after that projection (caps, scales) stays the model's own.
    """
    if not _keeps_logits(model):
        logits: Tensor = model(input_ids=micro.inputs, use_cache=False).logits
        return logits[micro.rows, micro.columns]
    kept, columns = torch.unique(micro.columns, return_inverse=True)
    if micro.prefixes.shape[1] == 0:
        logits = model(input_ids=micro.inputs, use_cache=False, logits_to_keep=kept).logits
    else:
        cache = _prefix_cache(model, micro)
        logits = model(input_ids=micro.inputs, past_key_values=cache, use_cache=True, logits_to_keep=kept).logits
    return logits[micro.rows, columns]


def _prefix_cache(model: PreTrainedModel, micro: MicroBatch) -> DynamicCache:
    """Keys and values of each row's prefix. Gradients flow back through them, summed over the rows that share one."""
    cache = DynamicCache(config=model.config)
    model(input_ids=micro.prefixes, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_select_indices(micro.prefix_rows)
    return cache


def _keeps_logits(model: PreTrainedModel) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
