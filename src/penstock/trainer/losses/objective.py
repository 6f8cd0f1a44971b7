"""Policy objectives, by name: pure functions of sampled tokens, a loss per token, no reduction.

Notation. pi is the policy being trained, mu the one that sampled the token (its log-probability was recorded by the
engine, whatever versions made the sample), prox a policy close to pi. rho = pi / mu, A the advantage, sg(.) carries no
gradient. Gradients are accumulated and applied once per batch, so that the weights at the beginning of the step, which
others recompute prox with, are those of pi itself: prox = sg(pi), unless `proximal` says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.config import ObjectiveConfig
from penstock.trainer.losses.parts import (
    bounded_below,
    pessimistic,
    ratio,
    sequence_mean,
    sequence_ratio,
    smallest_until,
    unit_ratio,
    within,
)


class Tokens(NamedTuple):
    """What an objective sees of N sampled tokens. All tokens of a sample that are in the loss are here, and only those:
    what is masked (too old, or of an earlier segment) takes no part in a sequence's ratio or length either."""

    logprobs: Tensor  # [N], log pi, with gradient
    behaviour: Tensor  # [N], log mu
    advantages: Tensor  # [N]
    samples: Tensor  # [N], number of the token's sample
    staleness: Tensor  # [N], versions between mu and pi
    proximal: Tensor | None = None  # [N], log prox where another policy than pi is meant


class PolicyLoss(NamedTuple):
    """All [N]; only `loss` carries a gradient."""

    loss: Tensor
    clipped: Tensor
    """1 where a clip or a mask removed the token's gradient."""


Objective = Callable[[Tokens, ObjectiveConfig], PolicyLoss]


def ppo(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), each token against the version that made it.

    PPO's clip (arXiv 1707.06347) with DAPO's two bounds (arXiv 2503.14476), as GRPO has it (arXiv 2402.03300). Of
    answers in segments this is segment-aware importance sampling: UloRL (arXiv 2507.19766), eq. 8; CoPRIS (2511.05589).
    """
    surrogate, clipped = _surrogate(ratio(tokens.logprobs, tokens.behaviour), tokens, config)
    return PolicyLoss(-surrogate, clipped)


def pois(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-A r with r = pi / sg(pi): every old policy is replaced by the newest, so nothing is corrected and nothing clips.

    Pseudo-on-policy importance sampling, UloRL (arXiv 2507.19766), section 3.1: all tokens of all segments are trained.
    Off-policy by whatever the versions differ; chosen, never inherited.
    """
    r = unit_ratio(tokens.logprobs)
    return PolicyLoss(-r * tokens.advantages, torch.zeros_like(tokens.advantages))


def reinforce(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-A log pi (Williams 1992), uncorrected."""
    weight = torch.ones_like(tokens.logprobs)
    return _score(weight, tokens, torch.zeros_like(weight))


def decoupled(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-w min(u A, clip(u, 1 - clip_low, 1 + clip_high) A), u = pi / prox, w = sg(min(prox / mu, cap)).

    Hilton et al., arXiv 2110.00641, eq. 5; AReaL (arXiv 2505.24298), eq. 5. The clip bounds the step from prox, the
    weight corrects for the policy that sampled.
    """
    prox = _proximal(tokens, config)
    weight = ratio(prox, tokens.behaviour).clamp(max=config.weight_cap)
    u = ratio(tokens.logprobs, prox)
    surrogate, clipped = _surrogate(u, tokens, config)
    return PolicyLoss(-weight * surrogate, clipped)


def tis(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-sg(min(rho, cap)) A log pi: truncated importance sampling per token (Espeholt et al., arXiv 1802.01561; Yao et
    al. 2025). Unlike a clip it never removes a gradient."""
    rho = ratio(tokens.logprobs, tokens.behaviour).detach()
    return _score(rho.clamp(max=config.weight_cap), tokens, torch.zeros_like(rho))


def sequence_tis(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-sg(min(prod rho, cap)) A log pi, the product over the sample's tokens (verl's `seq-TIS`).

    Short-biased by construction: a ratio of 1.1 per token is 2.6 after 10 tokens and 13 780 after 100.
    """
    product = sequence_ratio(tokens.logprobs.detach(), tokens.behaviour, tokens.samples)
    return _score(product.clamp(max=config.weight_cap), tokens, torch.zeros_like(product))


def sequence_mis(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-sg(w) A log pi, w = prod rho where that is at most `cap`, else 0: the sample is left out (verl's `seq-MIS`)."""
    product = sequence_ratio(tokens.logprobs.detach(), tokens.behaviour, tokens.samples)
    dropped = (product > config.weight_cap).to(product.dtype)
    return _score(product * (1 - dropped), tokens, dropped)


def geometric_mask(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """PPO on samples whose geometric mean of rho lies in [mask_low, mask_high]; the others are left out (verl's, and
    SkyRL's, geometric rejection: unlike a product it has no preference for short samples)."""
    inner = ppo(tokens, config)
    log_rho = (tokens.logprobs - tokens.behaviour).detach()
    keep = within(sequence_mean(log_rho, tokens.samples).exp(), config.mask_low, config.mask_high)
    return inner._replace(loss=inner.loss * keep, clipped=torch.maximum(inner.clipped, 1 - keep))


def cispo(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, no token loses its gradient.

    MiniMax-M1 (arXiv 2506.13585), eq. 4.
    """
    rho = ratio(tokens.logprobs, tokens.behaviour).detach()
    return _score(rho.clamp(1.0 - config.clip_low, 1.0 + config.clip_high), tokens, torch.zeros_like(rho))


def gspo(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = (prod rho)^(1 / T) of the sample, T its tokens.

    GSPO (arXiv 2507.18071), eq. 5, written per token as in its eq. 14: s = sg(s) pi / sg(pi), so that the mean over a
    sample's tokens (`normalize: sequence`) has the sequence's value and gradient. Bounds of 3e-4 and 4e-4 there.
    """
    log_rho = (tokens.logprobs - tokens.behaviour).detach()
    s = sequence_mean(log_rho, tokens.samples).clamp(max=20.0).exp() * unit_ratio(tokens.logprobs)
    surrogate, clipped = _surrogate(s, tokens, config)
    return PolicyLoss(-surrogate, clipped)


def topr(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-sg(w) A log pi with w = 1 where A > 0, and min(prod rho, 1) of the sample where A < 0.

    TOPR (arXiv 2503.14286), eq. 7: what is good is imitated whoever made it, what is bad counts only while the policy
    might still do it.
    """
    tapered = sequence_ratio(tokens.logprobs.detach(), tokens.behaviour, tokens.samples).clamp(max=1.0)
    weight = torch.where(tokens.advantages > 0, torch.ones_like(tapered), tapered)
    return _score(weight, tokens, torch.zeros_like(weight))


def icepop(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """Decoupled, with k = prox / mu as weight where mask_low <= k <= mask_high and no gradient elsewhere.

    IcePop (Ring-1T, arXiv 2510.18855); bounds of 0.5 and 5 there.
    """
    prox = _proximal(tokens, config)
    k = ratio(prox, tokens.behaviour)
    keep = within(k, config.mask_low, config.mask_high)
    u = ratio(tokens.logprobs, prox)
    surrogate, clipped = _surrogate(u, tokens, config)
    return PolicyLoss(-k * keep * surrogate, torch.maximum(clipped, 1 - keep))


def m2po(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """-rho A, without the tokens with the largest (log rho)^2: as few as bring its mean down to `second_moment`.

    M2PO (arXiv 2510.01161). Only tokens that a clip could concern are counted and dropped: A > 0 and rho > 1, or A < 0
    and rho < 1. The mean there is over a batch; here over each sample, so that no token depends on what else happened
    to be accumulated with it.
    """
    rho = ratio(tokens.logprobs, tokens.behaviour)
    log_rho = (tokens.logprobs - tokens.behaviour).detach()
    keep = smallest_until(log_rho**2, tokens.samples, log_rho * tokens.advantages > 0, config.second_moment)
    return PolicyLoss(-rho * tokens.advantages * keep, 1 - keep)


OBJECTIVES: dict[str, Objective] = {
    "ppo": ppo,
    "pois": pois,
    "reinforce": reinforce,
    "decoupled": decoupled,
    "tis": tis,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "geometric_mask": geometric_mask,
    "cispo": cispo,
    "gspo": gspo,
    "topr": topr,
    "icepop": icepop,
    "m2po": m2po,
}


def policy_loss(tokens: Tokens, config: ObjectiveConfig) -> PolicyLoss:
    """The loss of the objective that is configured."""
    return OBJECTIVES[config.name](tokens, config)


def _proximal(tokens: Tokens, config: ObjectiveConfig) -> Tensor:
    """log prox, [N]: as given; or pi as it is; or, `interpolated`, one version behind pi on the straight line from mu.

    A-3PO (arXiv 2512.06547): log prox = log mu + alpha (log pi - log mu), alpha = (v_prox - v_mu) / (v_pi - v_mu), with
    v_prox = v_pi - 1; mu itself where pi made the token.
    """
    if tokens.proximal is not None:
        return tokens.proximal
    pi = tokens.logprobs.detach()
    if config.proximal == "current":
        return pi
    alpha = (tokens.staleness - 1).clamp(min=0) / tokens.staleness.clamp(min=1)
    return tokens.behaviour + alpha * (pi - tokens.behaviour)


def _surrogate(u: Tensor, tokens: Tokens, config: ObjectiveConfig) -> tuple[Tensor, Tensor]:
    """Of the ratio u, clipped as configured, and 1 where a clip removed the gradient; both [N]."""
    surrogate, clipped = pessimistic(u, tokens.advantages, config.clip_low, config.clip_high)
    surrogate, floored = bounded_below(surrogate, tokens.advantages, config.dual_clip)
    return surrogate, torch.maximum(clipped, floored)


def _score(weight: Tensor, tokens: Tokens, clipped: Tensor) -> PolicyLoss:
    """-w A log pi, the weight being a constant."""
    return PolicyLoss(-weight * tokens.advantages * tokens.logprobs, clipped)
