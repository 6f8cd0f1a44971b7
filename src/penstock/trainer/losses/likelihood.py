"""Log-probability of chosen tokens and the entropy of the distribution they were chosen from."""

from __future__ import annotations

import torch
from torch import Tensor

ENTROPY_ELEMENTS = 2**26
"""At a time: over a large vocabulary its intermediates would weigh as much as the logits."""


def token_statistics(
    logits: Tensor,  # [num_tokens, vocab]
    chosen: Tensor,  # [num_tokens], token ids
    *,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(log pi(chosen), H(pi)), both [num_tokens] in float32, with pi = softmax(logits / temperature).

    H = -sum_v pi(v) log pi(v) over the whole vocabulary, in nats; it carries no gradient.
    """
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    log_pi = torch.log_softmax(scaled, dim=-1)
    rows = max(ENTROPY_ELEMENTS // logits.shape[-1], 1)
    entropy = torch.cat([_entropy(part) for part in torch.split(log_pi.detach(), rows)])
    return log_pi.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), entropy


def _entropy(log_pi: Tensor) -> Tensor:
    return -(log_pi.exp() * log_pi).nan_to_num(nan=0.0).sum(dim=-1)  # 0 * log 0 = 0 for masked-out logits
