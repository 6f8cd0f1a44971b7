"""One forward pass of any Hugging Face causal language model over a micro-batch."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.trainer.losses.likelihood import token_statistics
from penstock.trainer.packing import MicroBatch


def token_logprobs(model: PreTrainedModel, micro: MicroBatch, *, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probabilities, entropies) of the micro-batch's trained tokens, both [N] in float32."""
    logits = _logits(model, micro)
    return token_statistics(logits, micro.chosen, temperature=temperature)


def _logits(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """Logits that predict the trained tokens, [N, vocab].

    Models that offer `logits_to_keep` project only the columns where some row is trained: with a large vocabulary the
    prompt's logits would dwarf everything else. Anything after that projection (caps, scales) stays the model's own.
    """
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kept, position = torch.unique(micro.columns, return_inverse=True)
        logits = model(input_ids=micro.inputs, use_cache=False, logits_to_keep=kept).logits
        return logits[micro.rows, position]
    return model(input_ids=micro.inputs, use_cache=False).logits[micro.rows, micro.columns]
