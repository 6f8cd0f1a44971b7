"""The building blocks of the loss: ratios, weights, clips, masks, divisors. Pure functions of [N] sampled tokens.

Weights and masks carry no gradient: they scale a token's gradient and do not change its direction.

A sum over tokens is divided in two places. The factor of a single sample (`shares`) is applied when the sample's
gradient is added. The step's divisor (`denominator`) is applied at the step. Any partition of a step's samples
therefore gives the same gradient. All tokens in the loss count, including tokens without a gradient after a clip or a
mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from penstock.config import MasteredConfig

Normalize = Literal["token", "sequence", "constant"]

MAX_LOG_RATIO = 20.0
"""Bound of |log ratio|. Products with exp(20) = 5e8 stay finite in float32. Without the bound, one extreme token makes
all gradients NaN."""
INFINITY_BITS = 0x7F80_0000
"""The bits of an infinite float32, as an integer. Those of the floats from 0 to it are in the order of the floats."""
NUM_PROBES = 255
"""Bounds that `largest_kept` tries with one exchange between the ranks. Four exchanges suffice, as 256^4 exceeds the
number of float32 values."""


def ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return pi / pi_old of each token, [N]."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def unit_ratio(logprobs: Tensor) -> Tensor:
    """Return 1 with the gradient of log pi, [N]: the ratio pi / sg(pi)."""
    return (logprobs - logprobs.detach()).exp()


def sequence_sum(values: Tensor, samples: Tensor) -> Tensor:
    """Return for every token the sum over its sample's tokens, [N]. `samples` [N]: number of each token's sample, below
    N."""
    return torch.zeros_like(values).index_add(0, samples, values)[samples]


def sequence_mean(values: Tensor, samples: Tensor) -> Tensor:
    """Return for every token the mean over its sample's tokens, [N]."""
    return sequence_sum(values, samples) / sequence_sum(torch.ones_like(values), samples)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, samples: Tensor) -> Tensor:
    """Return for every token the product of its sample's ratios, [N]."""
    log_product = sequence_sum(logprobs - old_logprobs, samples)
    return ratio(log_product, torch.zeros_like(log_product))


def within(values: Tensor, low: float, high: float) -> Tensor:
    """Return 1 where low <= value <= high, else 0."""
    return ((values >= low) & (values <= high)).to(values.dtype)


def smallest_until(squares: Tensor, samples: Tensor, candidates: Tensor, budget: float) -> Tensor:
    """Return 0 for dropped tokens, else 1; [N].

    In each sample the candidates with the largest `squares` are dropped. As few are dropped as bring the mean over the
    sample's remaining candidates down to `budget`. Of equal squares, those of later tokens are dropped first.
    """
    keep = torch.ones_like(squares)
    order = torch.argsort(squares, stable=True)
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


def largest_kept(squares: Tensor, budget: float, total: Callable[[list[float]], list[float]]) -> float:
    """Return the largest bound for which the mean of all `squares` up to the bound is at most `budget`.

    So as few squares as possible are dropped, and equal ones are kept or dropped together. An infinite square is always
    dropped. `squares` [N]: this rank's, float32, at least 0. `total`: returns the sums of numbers over the ranks. All
    ranks must call this, and get the same bound.

    The mean grows with the bound. The search therefore narrows an interval of bounds, given by their bits.
    """
    ordered = squares.sort().values
    sums = torch.nn.functional.pad(ordered.cumsum(0, dtype=torch.float64), (1, 0))  # of the first 0, 1, ... N squares
    fits, exceeds = 0, INFINITY_BITS
    while exceeds - fits > 1:
        probes = [fits + (exceeds - fits) * number // (NUM_PROBES + 1) for number in range(1, NUM_PROBES + 1)]
        bounds = torch.tensor(probes, dtype=torch.int32).view(torch.float32)
        counts = torch.searchsorted(ordered, bounds, right=True)
        totals = total([*sums[counts].tolist(), *counts.tolist()])
        num_fit = 0
        while num_fit < NUM_PROBES and totals[num_fit] <= budget * totals[NUM_PROBES + num_fit]:
            num_fit += 1
        tried = [fits, *probes, exceeds]
        fits, exceeds = tried[num_fit], tried[num_fit + 1]
    return float(torch.tensor(fits, dtype=torch.int32).view(torch.float32))


def shares(samples: Tensor, normalize: Normalize) -> Tensor:
    """Return each token's factor, [N]: one over its sample's tokens for `sequence`, else 1.

    `samples` [N]: number of each token's sample, below N.
    """
    ones = torch.ones(len(samples), device=samples.device)
    return ones / sequence_sum(ones, samples) if normalize == "sequence" else ones


def denominator(normalize: Normalize, *, tokens: float, samples: float, max_tokens: int) -> float:
    """Return the divisor of a step, at least 1. `tokens`: tokens in the loss. `samples`: samples with such tokens."""
    return max({"token": tokens, "sequence": samples, "constant": samples * max_tokens}[normalize], 1)


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Return ref / pi - log(ref / pi) - 1 >= 0: an unbiased estimate of KL(pi, ref) if pi sampled the token.

    Schulman, "Approximating KL divergence" (2020), k3; GRPO's penalty (arXiv 2402.03300, eq. 4).
    """
    log_ratio = (reference_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.exp() - log_ratio - 1.0


def mastered(
    logprobs: Tensor, entropy: Tensor, advantages: Tensor, samples: Tensor, config: MasteredConfig
) -> Tensor:  # [N]
    """Return 1 for mastered tokens, which the loss leaves out, else 0. All arguments are [N]; `entropy` is in nats.

    A token is mastered if its probability is at least `probability`, its A > 0, and its sample's mean entropy is below
    `entropy`. Dynamic masking of well-mastered positive tokens, UloRL (arXiv 2507.19766), section 3.3. Constant masking
    raises the entropy, and no masking lets it fall. Masking below the threshold alone holds it at the threshold.
    """
    confident = logprobs.detach().exp() >= config.probability
    low_entropy = sequence_mean(entropy, samples) < config.entropy
    return (confident & low_entropy & (advantages > 0)).to(logprobs.dtype)
