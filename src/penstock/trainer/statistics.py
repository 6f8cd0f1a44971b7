"""What an optimizer step is told about: sums over its trained tokens, turned into means when it is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.trainer.losses.divergence import absolute_difference
from penstock.trainer.losses.policy_gradient import PolicyLoss


@dataclass(slots=True)
class StepStatistics:
    """Sums since the last optimizer step. All zero at birth."""

    samples: int = 0
    tokens: int = 0
    """Tokens in the loss: its denominator."""
    tokens_masked_stale: int = 0
    staleness: int = 0
    staleness_max: int = 0
    kl_tokens: int = 0
    """Tokens of samples that the version being trained made alone."""
    busy_s: float = 0.0
    sums: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    """loss, clipped tokens, ratio, entropy, |logprob difference| where comparable."""

    def add_tokens(
        self, loss: PolicyLoss, entropy: Tensor, logprobs: Tensor, behaviour: Tensor, current: Tensor
    ) -> None:
        """Add the tokens of one micro-batch; all [N], `current` is 1 in samples of the trained version alone."""
        with torch.no_grad():
            difference = absolute_difference(logprobs, behaviour) * current
            rows = torch.stack((loss.loss, loss.clipped, loss.ratio, entropy, difference))
            self.sums += rows.sum(dim=1, dtype=torch.float64).cpu()

    def means(self) -> dict[str, float]:
        """Metrics by name; zero where nothing was counted."""
        tokens = max(self.tokens, 1)
        loss, clipped, ratio, entropy, difference = self.sums.tolist()
        return {
            "loss": loss / tokens,
            "clip_fraction": clipped / tokens,
            "ratio_mean": ratio / tokens,
            "entropy": entropy / tokens,
            "kl_engine_trainer": difference / max(self.kl_tokens, 1),
            "kl_tokens": float(self.kl_tokens),
            "tokens": float(self.tokens),
            "tokens_masked_stale": float(self.tokens_masked_stale),
            "staleness_mean": self.staleness / tokens,
            "staleness_max": float(self.staleness_max),
            "samples": float(self.samples),
        }
