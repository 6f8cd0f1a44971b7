"""The few parts that every objective is composed of: ratios, weights, clips, masks. Pure, over [N] sampled tokens.

Weights and masks carry no gradient: they say how much a token counts, not where it should go.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8 still multiplies finitely in float32; without the bound, one absurd token makes every gradient NaN."""


def ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """pi / pi_old of each token, [N]."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def unit_ratio(logprobs: Tensor) -> Tensor:
    """1 with the gradient of log pi, [N]: what a ratio against the very policy being trained is."""
    return (logprobs - logprobs.detach()).exp()


def sequence_sum(values: Tensor, samples: Tensor) -> Tensor:
    """[N]: for every token the sum over its sample's tokens. `samples` [N] says which sample a token belongs to."""
    size = int(samples.max()) + 1 if len(samples) else 0
    return values.new_zeros(size).index_add(0, samples, values)[samples]


def sequence_mean(values: Tensor, samples: Tensor) -> Tensor:
    """[N]: for every token the mean over its sample's tokens."""
    return sequence_sum(values, samples) / sequence_sum(torch.ones_like(values), samples)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, samples: Tensor) -> Tensor:
    """[N]: for every token the product of its sample's ratios."""
    log_product = sequence_sum(logprobs - old_logprobs, samples)
    return ratio(log_product, torch.zeros_like(log_product))


def pessimistic(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's min(rho A, clip(rho, 1 - low, 1 + high) A), and 1 where that removed the token's gradient; both [N].

    Schulman et al., arXiv 1707.06347, eq. 7; two bounds instead of one (clip-higher) are DAPO's, arXiv 2503.14476.
    """
    free, bounded = ratio * advantages, ratio.clamp(1.0 - low, 1.0 + high) * advantages
    return torch.minimum(free, bounded), (bounded < free).detach().to(ratio.dtype)


def bounded_below(surrogate: Tensor, advantages: Tensor, floor: float | None) -> tuple[Tensor, Tensor]:
    """Dual clip: where A < 0 the surrogate is at least floor * A, so that one absurd ratio cannot dominate; and 1 where
    that removed the token's gradient; both [N].

    Ye et al., arXiv 1912.09729, eq. 5.
    """
    if floor is None:
        return surrogate, torch.zeros_like(advantages)
    below = (advantages < 0) & (surrogate < floor * advantages)
    return torch.where(below, floor * advantages, surrogate), below.to(advantages.dtype)


def within(values: Tensor, low: float, high: float) -> Tensor:
    """1 where low <= value <= high, else 0."""
    return ((values >= low) & (values <= high)).to(values.dtype)


def smallest_until(squares: Tensor, samples: Tensor, candidates: Tensor, budget: float) -> Tensor:
    """1 for all tokens but the candidates with the largest `squares` of each sample, as few of them as bring the mean
    over the sample's candidates down to `budget`; [N]."""
    keep = torch.ones_like(squares)
    order = torch.argsort(squares)
    order = order[candidates[order]]
    order = order[torch.argsort(samples[order], stable=True)]  # by sample, then ascending
    if not len(order):
        return keep
    sample, value = samples[order], squares[order]
    starts = torch.ones_like(sample, dtype=torch.bool)
    starts[1:] = sample[1:] != sample[:-1]
    position = torch.arange(len(order), device=order.device)
    start = torch.cummax(torch.where(starts, position, 0), dim=0).values
    total = torch.cumsum(value.double(), dim=0)
    before = torch.where(start > 0, total[(start - 1).clamp(min=0)], torch.zeros_like(total))
    mean = (total - before) / (position - start + 1)
    keep[order[mean > budget]] = 0.0
    return keep
