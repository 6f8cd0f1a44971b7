"""What an optimizer step is told about: sums over its trained tokens, turned into means when it is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.trainer.ranks import Ranks

SUMS = (
    "loss",
    "clipped",
    "ratio",
    "ratio_squared",
    "sample_weight",
    "sample_weight_squared",
    "entropy",
    "difference",
    "kl",
    "mastered",
)
"""The loss with each token's share; a sample's weight spread over its tokens; |logprob difference| to the engine where
comparable; the rest plain."""

COUNTS = (
    "samples",
    "trained_samples",
    "tokens",
    "tokens_masked_stale",
    "tokens_masked_foreign",
    "tokens_masked_segments",
    "staleness",
    "kl_tokens",
)
"""Whole numbers that add up."""


@dataclass(slots=True)
class StepStatistics:
    """Sums since the last optimizer step. All zero at birth."""

    samples: int = 0
    trained_samples: int = 0
    """Samples with a token in the loss."""
    tokens: int = 0
    """Tokens in the loss."""
    tokens_masked_stale: int = 0
    tokens_masked_foreign: int = 0
    """Of versions above the one being trained."""
    tokens_masked_segments: int = 0
    """Young enough, but not of their answer's newest version."""
    staleness: int = 0
    staleness_max: int = 0
    kl_tokens: int = 0
    """Tokens of samples that the version which compares made alone."""
    difference_max: float = 0.0
    """Of one token, where comparable."""
    busy_s: float = 0.0
    sums: Tensor = field(default_factory=lambda: torch.zeros(len(SUMS), dtype=torch.float64))
    """By the names of `SUMS`."""

    def add_tokens(self, **rows: Tensor) -> None:
        """Add the tokens of one micro-batch: for each of `SUMS` its values, [N]."""
        stacked = torch.stack([rows[name].detach().float() for name in SUMS])
        self.sums += stacked.sum(dim=1, dtype=torch.float64).cpu()
        self.difference_max = max([self.difference_max, *rows["difference"].tolist()])

    def over(self, ranks: Ranks) -> StepStatistics:
        """Those of all ranks together; `busy_s` is the mean of theirs."""
        own = [*(float(getattr(self, name)) for name in COUNTS), self.busy_s, *self.sums.tolist()]
        totals = ranks.total(own, "add up what the step saw")
        staleness_max, difference_max = ranks.largest(
            [self.staleness_max, self.difference_max], "find the largest of what the step saw"
        )
        counts = {name: int(total) for name, total in zip(COUNTS, totals, strict=False)}
        return StepStatistics(
            **counts,
            staleness_max=int(staleness_max),
            difference_max=difference_max,
            busy_s=totals[len(COUNTS)] / ranks.size,
            sums=torch.tensor(totals[len(COUNTS) + 1 :], dtype=torch.float64),
        )

    def means(self, denominator: int) -> dict[str, float]:
        """Metrics by name; zero where nothing was counted. `denominator` is the loss's."""
        tokens = max(self.tokens, 1)
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        return {
            "loss": total["loss"] / denominator,
            "clip_fraction": total["clipped"] / tokens,
            "ratio_mean": total["ratio"] / tokens,
            "ess": _effective_size(total["ratio"], total["ratio_squared"], tokens),
            "sample_ess": _effective_size(total["sample_weight"], total["sample_weight_squared"], self.trained_samples),
            "entropy": total["entropy"] / tokens,
            "kl_reference": total["kl"] / tokens,
            "mastered_fraction": total["mastered"] / tokens,
            "kl_engine_trainer": total["difference"] / max(self.kl_tokens, 1),
            "parity_gap_max": self.difference_max,
            "kl_tokens": float(self.kl_tokens),
            "tokens": float(self.tokens),
            "tokens_masked_stale": float(self.tokens_masked_stale),
            "tokens_masked_foreign": float(self.tokens_masked_foreign),
            "tokens_masked_segments": float(self.tokens_masked_segments),
            "staleness_mean": self.staleness / tokens,
            "staleness_max": float(self.staleness_max),
            "samples": float(self.samples),
        }


def _effective_size(total: float, squared: float, count: int) -> float:
    """(sum w)^2 / (count sum w^2): 1 if all weights are equal, 1 / count if one is all; 0 of nothing."""
    return total**2 / (count * squared) if squared else 0.0
