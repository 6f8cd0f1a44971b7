"""How far two policies are apart on sampled tokens, from log-probabilities alone. Shapes are [num_tokens]."""

from __future__ import annotations

from torch import Tensor


def absolute_difference(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """|log pi - log mu|: zero where trainer and engine compute the same thing, whatever they sampled."""
    return (logprobs - behaviour_logprobs).abs()


def k3(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """(r - 1) - log r with r = pi / mu: unbiased for KL(mu || pi) under tokens of mu, never negative.

    Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
    """
    log_ratio = logprobs - behaviour_logprobs
    return log_ratio.expm1() - log_ratio
