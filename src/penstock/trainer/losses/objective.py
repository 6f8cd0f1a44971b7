"""Policy objectives by name: pure functions of sampled tokens that return one loss per token, without reduction.

Notation. pi: the policy being trained. mu: the policy that sampled the token; the engine recorded its log-probability
at each token, also if several versions made the sample. prox: a policy close to pi. rho = pi / mu. A: the advantage.
sg(.): stop-gradient. Gradients are accumulated and applied once per batch. pi therefore still has the weights of the
step's beginning, with which other implementations recompute prox: prox = sg(pi), unless `proximal` configures another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config import ObjectiveConfig
from penstock.trainer.losses.parts import (
    largest_kept,
    ratio,
    sequence_mean,
    sequence_ratio,
    smallest_until,
    unit_ratio,
    within,
)


class Tokens(NamedTuple):
    """The inputs of an objective: N sampled tokens, which are all tokens in the loss of their samples.

    Masked tokens (too old, or of an earlier segment) are absent. They count neither in a sequence's ratio nor in its
    length.
    """

    logprobs: Tensor  # [N], log pi, with gradient
    behaviour: Tensor  # [N], log mu
    advantages: Tensor  # [N]
    samples: Tensor  # [N], number of the token's sample
    staleness: Tensor  # [N], versions between mu and pi
    proximal: Tensor | None = None  # [N], log prox if prox is another policy than pi
    kept: Tensor | None = None  # [N], whether `batch_mask` keeps the token; None if the objective has no such mask


class PolicyLoss(NamedTuple):
    """The result of an objective. All fields are [N]; only `loss` carries a gradient."""

    loss: Tensor
    clipped: Tensor
    """1 where a clip or a mask removed the token's gradient."""


Objective = Callable[[Tokens, ObjectiveConfig], PolicyLoss]


def ppo(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), with rho relative to each token's own version.

    PPO's clip (arXiv 1707.06347) with DAPO's two bounds (arXiv 2503.14476), as in GRPO (arXiv 2402.03300). For answers
    in segments this is segment-aware importance sampling: UloRL (arXiv 2507.19766), eq. 8; CoPRIS (2511.05589).
    """
    surrogate, clipped = _surrogate(ratio(tokens.logprobs, tokens.behaviour), tokens, config)
    return PolicyLoss(-surrogate, clipped)


def pois(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -A r with r = pi / sg(pi). The newest policy stands in for every old one: no correction and no clip.

    Pseudo-on-policy importance sampling, UloRL (arXiv 2507.19766), section 3.1: all tokens of all segments are trained.
    The difference between versions stays uncorrected, so this objective is never a default and must be configured.
    """
    r = unit_ratio(tokens.logprobs)
    return PolicyLoss(-r * tokens.advantages, torch.zeros_like(tokens.advantages))


def reinforce(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -A log pi (Williams 1992), without off-policy correction."""
    return _score(torch.ones_like(tokens.logprobs), tokens)


def decoupled(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A), u = pi / prox, w = sg(min(prox / mu, cap)).

    Hilton et al., arXiv 2110.00641, eq. 5; AReaL (arXiv 2505.24298), eq. 5. The clip bounds the step away from prox.
    The weight corrects for the difference between prox and mu. With `beyond_cap: mask`, w = 0 where prox / mu > cap.
    """
    prox = _proximal(tokens, config)
    weight = ratio(prox, tokens.behaviour)
    beyond = (weight > config.weight_cap).to(weight.dtype) * (config.beyond_cap == "mask")
    weight = weight.clamp(max=config.weight_cap) * (1.0 - beyond)
    u = ratio(tokens.logprobs, prox)
    surrogate, clipped = _surrogate(u, tokens, config)
    return PolicyLoss(-weight * surrogate, torch.maximum(clipped, beyond))


def tis(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -sg(min(rho, cap)) A log pi: truncated importance sampling per token.

    Espeholt et al., arXiv 1802.01561; Yao et al. 2025. Unlike a clip it never removes a gradient.
    """
    rho = ratio(tokens.logprobs, tokens.behaviour).detach()
    return _score(rho.clamp(max=config.weight_cap), tokens)


def sequence_tis(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -sg(min(prod rho, cap)) A log pi, with the product over the sample's tokens (verl's `seq-TIS`).

    The weight is biased towards short samples: a ratio of 1.1 per token gives 2.6 after 10 tokens and 13 780 after 100.
    """
    product = sequence_ratio(tokens.logprobs.detach(), tokens.behaviour, tokens.samples)
    return _score(product.clamp(max=config.weight_cap), tokens)


def sequence_mis(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -sg(w) A log pi, with w = prod rho where prod rho <= cap.

    Samples above `cap` have w = 0, which drops them (verl's `seq-MIS`).
    """
    product = sequence_ratio(tokens.logprobs.detach(), tokens.behaviour, tokens.samples)
    dropped = (product > config.weight_cap).to(product.dtype)
    return _score(product * (1 - dropped), tokens, dropped)


def geometric_mask(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return PPO's loss on samples with a geometric mean of rho in [mask_low, mask_high], and 0 on other samples.

    This is the geometric rejection of verl and SkyRL. Unlike a product it does not favour short samples.
    """
    inner = ppo(tokens, config)
    log_rho = (tokens.logprobs - tokens.behaviour).detach()
    keep = within(sequence_mean(log_rho, tokens.samples).exp(), config.mask_low, config.mask_high)
    return inner._replace(loss=inner.loss * keep, clipped=torch.maximum(inner.clipped, 1 - keep))


def cispo(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, no token loses its gradient.

    MiniMax-M1 (arXiv 2506.13585), eq. 4; without a lower bound, as there.
    """
    rho = ratio(tokens.logprobs, tokens.behaviour).detach()
    return _score(rho.clamp(1.0 - config.clip_low, 1.0 + config.clip_high), tokens)


def gspo(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = (prod rho)^(1 / T) of a sample with T tokens.

    GSPO (arXiv 2507.18071), eq. 5, written per token as in its eq. 14: s = sg(s) pi / sg(pi). The mean over a sample's
    tokens (`normalize: sequence`) then has the sequence's value and gradient. The paper's bounds are 3e-4 and 4e-4.
    """
    log_rho = (tokens.logprobs - tokens.behaviour).detach()
    s = sequence_mean(log_rho, tokens.samples).clamp(max=20.0).exp() * unit_ratio(tokens.logprobs)
    surrogate, clipped = _surrogate(s, tokens, config)
    return PolicyLoss(-surrogate, clipped)


def topr(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -sg(w) A log pi with w = 1 where A > 0, and w = min(prod rho, 1) of the sample where A < 0.

    TOPR (arXiv 2503.14286), eq. 7. The policy imitates good samples of any policy. A bad sample counts only as far as
    the policy is still likely to produce it.
    """
    tapered = sequence_ratio(tokens.logprobs.detach(), tokens.behaviour, tokens.samples).clamp(max=1.0)
    weight = torch.where(tokens.advantages > 0, torch.ones_like(tapered), tapered)
    return _score(weight, tokens)


def icepop(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return the decoupled loss with weight k = prox / mu where mask_low <= k <= mask_high, and no gradient elsewhere.

    IcePop (Ring-1T, arXiv 2510.18855); the paper's bounds are 0.5 and 5.
    """
    prox = _proximal(tokens, config)
    k = ratio(prox, tokens.behaviour)
    keep = within(k, config.mask_low, config.mask_high)
    u = ratio(tokens.logprobs, prox)
    surrogate, clipped = _surrogate(u, tokens, config)
    return PolicyLoss(-k * keep * surrogate, torch.maximum(clipped, 1 - keep))


def m2po(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Return -rho A without the tokens with the largest (log rho)^2.

    M2PO (arXiv 2510.01161). Only tokens that a clip could affect are candidates: A > 0 and rho > 1, or A < 0 and
    rho < 1. As few candidates are dropped as bring the mean of (log rho)^2 over the candidates down to `second_moment`.
    With `second_moment_over: batch` the mean is over all samples that arrive together, as in the paper's algorithm 1
    (see `batch_mask`). With `sample` it is over each sample, so that a token's loss does not depend on other samples.
    """
    rho = ratio(tokens.logprobs, tokens.behaviour)
    if config.masks_batch:
        assert tokens.kept is not None, "the mask over the batch comes with the tokens"
        keep = tokens.kept.to(rho.dtype)
    else:
        log_rho = (tokens.logprobs - tokens.behaviour).detach()
        keep = smallest_until(log_rho**2, tokens.samples, log_rho * tokens.advantages > 0, config.second_moment)
    return PolicyLoss(-rho * tokens.advantages * keep, 1 - keep)


def batch_mask(
    log_rho: Tensor,  # [S], float32; 0 for tokens that are not in the loss
    advantages: Tensor,  # [S]
    config: ObjectiveConfig,
    total: Callable[[list[float]], list[float]],
) -> Tensor:
    """Return which of this rank's tokens an objective with `masks_batch` keeps, [S] bool.

    The formula is that of `m2po`, over the tokens of all ranks. `total`: returns the sums of numbers over the ranks.
    All ranks must call this.
    """
    squares, candidates = log_rho**2, log_rho * advantages > 0
    bound = largest_kept(squares[candidates], config.second_moment, total)
    return ~(candidates & (squares > bound))


OBJECTIVES: dict[str, Objective] = {
    objective.__name__: objective
    for objective in (
        *(ppo, pois, reinforce, decoupled, tis, sequence_tis, sequence_mis),
        *(geometric_mask, cispo, gspo, topr, icepop, m2po),
    )
}
"""The objectives by the name in `trainer.objective.name`."""


def _proximal(tokens: Tokens, config: ObjectiveConfig) -> Tensor:
    """Return log prox, [N]: the given one, or log pi for `current`, or else an interpolation between mu and pi.

    The interpolation stands for the version before pi. A-3PO (arXiv 2512.06547): log prox = log mu +
    alpha (log pi - log mu), alpha = (v_prox - v_mu) / (v_pi - v_mu), v_prox = v_pi - 1. It is mu itself if v_mu = v_pi.
    """
    if tokens.proximal is not None:
        return tokens.proximal
    pi = tokens.logprobs.detach()
    if config.proximal == "current":
        return pi
    alpha = (tokens.staleness - 1).clamp(min=0) / tokens.staleness.clamp(min=1)
    return tokens.behaviour + alpha * (pi - tokens.behaviour)


def _surrogate(u: Tensor, tokens: Tokens, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """Return PPO's min(u A, clip(u, 1 - clip_low, 1 + clip_high) A), and 1 where a bound removed the gradient; [N].

    Schulman et al., arXiv 1707.06347, eq. 7; two bounds instead of one (clip-higher) are DAPO's, arXiv 2503.14476.
    Where A < 0, `dual_clip` bounds the surrogate below by dual_clip * A: this keeps one extreme ratio from dominating.
    Ye et al., arXiv 1912.09729, eq. 5.
    """
    advantages = tokens.advantages
    free, bounded = u * advantages, u.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    surrogate, clipped = torch.minimum(free, bounded), bounded < free
    if config.dual_clip is not None:
        floor = config.dual_clip * advantages
        is_below = (advantages < 0) & (surrogate < floor)
        surrogate, clipped = torch.where(is_below, floor, surrogate), clipped | is_below
    return surrogate, clipped.to(u.dtype)


def _score(weight: Tensor, tokens: Tokens, clipped: Tensor | None = None) -> PolicyLoss:
    """Return the loss -w A log pi with a constant weight. `clipped`: None if no token loses its gradient."""
    clipped = torch.zeros_like(weight) if clipped is None else clipped
    return PolicyLoss(-weight * tokens.advantages * tokens.logprobs, clipped)
