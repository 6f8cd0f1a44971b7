"""How far two policies are apart on sampled tokens, from log-probabilities alone. Shapes are [num_tokens]."""

from __future__ import annotations

from torch import Tensor

from penstock.trainer.losses.parts import MAX_LOG_RATIO


def absolute_difference(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """|log pi - log mu|: zero where trainer and engine compute the same thing, whatever they sampled."""
    return (logprobs - behaviour_logprobs).abs()


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """ref / pi - log(ref / pi) - 1 >= 0: an unbiased estimate of KL(pi, ref) where pi sampled the token.

    Schulman, "Approximating KL divergence" (2020), k3; GRPO's penalty (arXiv 2402.03300, eq. 4).
    """
    log_ratio = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1.0
