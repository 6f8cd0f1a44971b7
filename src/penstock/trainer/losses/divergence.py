"""How far two policies are apart on sampled tokens, from log-probabilities alone. Shapes are [num_tokens]."""

from __future__ import annotations

from torch import Tensor


def absolute_difference(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """|log pi - log mu|: zero where trainer and engine compute the same thing, whatever they sampled."""
    return (logprobs - behaviour_logprobs).abs()
