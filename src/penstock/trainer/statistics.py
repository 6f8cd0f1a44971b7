"""Statistics of an optimizer step: sums over its trained tokens, which become means when the step is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.ports.training import LAGS
from penstock.trainer.ranks import Ranks

MEANS = ("clip_fraction", "ratio_mean", "entropy", "kl_reference", "mastered_fraction")
"""Metrics that are means over the tokens in the loss."""

SUMS = (*MEANS, "loss", "ratio_squared", "sample_weight", "sample_weight_squared", "difference")
"""Names of the values that are summed over tokens.

`loss` includes each token's factor from `shares`. `sample_weight` and its square are spread over the sample's tokens.
`difference` is |logprob trainer - engine| at comparable tokens. The other values are plain.
"""

REPORTED = (
    *("samples", "tokens", "tokens_masked_stale", "tokens_masked_foreign", "tokens_masked_segments", "tokens_replayed"),
    *("kl_tokens", "staleness_max"),
)
"""Counts that are metrics under their own names.

`tokens`: tokens in the loss. Left out are tokens that are too old (`stale`), of versions above the current one
(`foreign`), or fresh but not of the newest version in their answer (`segments`). `tokens_replayed`: tokens in the loss
whose log-probability was computed with recorded experts. `kl_tokens`: comparable tokens in the
loss, which are the leading tokens of samples that the compared version sampled.
"""

COUNTS = (*REPORTED[:-1], "trained_samples", "staleness", "busy_s", *LAGS)
"""Names of the counts that are summed over ranks. `trained_samples`: samples with a token in the loss. `LAGS`: tokens
in the loss by their staleness."""


@dataclass(slots=True)
class StepStatistics:
    """Sums since the last optimizer step. All values start at zero."""

    counts: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*COUNTS, "staleness_max"), 0.0))
    difference_max: Tensor = field(default_factory=lambda: torch.zeros(()))
    """Largest |logprob trainer - engine| of a comparable token."""
    sums: Tensor = field(default_factory=lambda: torch.zeros(len(SUMS), dtype=torch.float64))
    """Sums in the order of `SUMS`. They are on the device until the step ends, so that no micro-batch waits for it."""

    def add_tokens(self, rows: Mapping[str, Tensor]) -> None:
        """Add the tokens of one micro-batch. `rows` has the values of each name in `SUMS`, [N]."""
        stacked = torch.stack([rows[name].detach().float() for name in SUMS])
        self.sums = self.sums.to(stacked.device) + stacked.sum(dim=1, dtype=torch.float64)
        differences = torch.cat((self.difference_max.to(stacked.device).view(1), rows["difference"].detach().float()))
        self.difference_max = differences.nan_to_num(nan=0.0, posinf=torch.inf).max()

    def add_counts(self, *, staleness_max: float, **counts: float) -> None:
        """Add the counts of one batch."""
        for name, count in counts.items():
            self.counts[name] += float(count)
        self.counts["staleness_max"] = max(self.counts["staleness_max"], float(staleness_max))

    def over(self, ranks: Ranks) -> StepStatistics:
        """Return the statistics of all ranks together. `busy_s` is the mean over ranks."""
        own = [*(self.counts[name] for name in COUNTS), *self.sums.tolist()]
        totals = ranks.total(own, "add up the statistics of the step")
        largest = [self.counts["staleness_max"], float(self.difference_max)]
        staleness_max, difference_max = ranks.largest(largest, "find the largest values of the step")
        counts = dict(zip(COUNTS, totals, strict=False)) | {"staleness_max": staleness_max}
        counts["busy_s"] /= ranks.size
        sums = torch.tensor(totals[len(COUNTS) :], dtype=torch.float64)
        return StepStatistics(counts, torch.tensor(difference_max, dtype=torch.float64), sums)

    def means(self, denominator: float) -> dict[str, float]:
        """Return the metrics by name, zero if nothing was counted. `denominator`: the divisor of the loss."""
        tokens, samples = max(self.counts["tokens"], 1), self.counts["trained_samples"]
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        return {name: self.counts[name] for name in (*REPORTED, *LAGS)} | {
            "loss": total["loss"] / denominator,
            "ess": _effective_size(total["ratio_mean"], total["ratio_squared"], tokens),
            "sample_ess": _effective_size(total["sample_weight"], total["sample_weight_squared"], samples),
            "kl_engine_trainer": total["difference"] / max(self.counts["kl_tokens"], 1),
            "parity_gap_max": float(self.difference_max),
            "staleness_mean": self.counts["staleness"] / tokens,
            **{name: total[name] / tokens for name in MEANS},
        }


def _effective_size(total: float, squared: float, count: float) -> float:
    """Return (sum w)^2 / (count sum w^2): 1 for equal weights, 1 / count for a single non-zero weight, 0 for none."""
    return total**2 / (count * squared) if squared else 0.0
