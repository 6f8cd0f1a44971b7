"""Token-level policy-gradient losses: pure functions over [num_tokens] tensors, one loss per token, no reduction."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8 still multiplies finitely in float32; without the bound, one absurd token makes every gradient NaN."""


class PolicyLoss(NamedTuple):
    """All [num_tokens]; only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """1 where the clip removed the token's gradient."""


def clipped_policy_loss(
    logprobs: Tensor,  # [num_tokens], log pi(a|s) of the policy being trained
    behaviour_logprobs: Tensor,  # [num_tokens], log mu(a|s) recorded by the engine that sampled
    advantages: Tensor,  # [num_tokens]
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho = pi / mu.

    PPO (Schulman et al., arXiv 1707.06347, eq. 7) with the asymmetric range of DAPO (arXiv 2503.14476, section 3.1).
    """
    log_ratio = (logprobs - behaviour_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    with torch.no_grad():
        removed = (clipped < unclipped).to(ratio.dtype)
    return PolicyLoss(-torch.minimum(unclipped, clipped), ratio.detach(), removed)
