"""What a sum over tokens is divided by.

A sample's own share enters as its gradient is added, the rest at the step, so that any partition of a step's samples
gives the same gradient. All tokens in the loss count, those that a clip or a mask left without a gradient included.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from penstock.trainer.losses.parts import sequence_sum

Normalize = Literal["token", "sequence", "constant"]


def shares(samples: Tensor, normalize: Normalize) -> Tensor:
    """[N]: one over the sample's tokens for `sequence`, else 1. `samples` [N] numbers each token's sample."""
    ones = torch.ones(len(samples), device=samples.device)
    return ones / sequence_sum(ones, samples) if normalize == "sequence" else ones


def denominator(normalize: Normalize, *, tokens: int, samples: int, max_tokens: int) -> int:
    """Of a step with so many tokens in the loss, of so many samples; at least 1."""
    match normalize:
        case "token":
            return max(tokens, 1)
        case "sequence":
            return max(samples, 1)
        case "constant":
            return max(samples * max_tokens, 1)
