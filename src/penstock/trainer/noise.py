"""The gradient noise scale from two batch sizes (An Empirical Model of Large-Batch Training, arXiv 1812.06162).

The expected squared norm of a gradient averaged over B samples is |G|^2 + tr(S) / B. Measurements at two sizes give
both terms. The small batch may be part of the large one, since only the expectations matter. Gradient accumulation
computes both gradients anyway, so a measurement costs one additional norm. A single measurement is noisy and may even
be negative. For the scale B_simple = tr(S) / |G|^2, average numerator and denominator separately.

The advantages within a group depend on each other, so the gradients of its samples are not independent. The small batch
therefore consists of whole groups. It takes the first groups. If groups are trained as they become ready, the first
groups have shorter answers, and their difference from the remaining groups counts as noise too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.trainer.shards import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorm:
    """The squared norm of a mean gradient over some samples."""

    samples: float
    squared: float


def noise(small: GradientNorm, large: GradientNorm) -> dict[str, float]:
    """Return `noise_signal` (|G|^2) and `noise_trace` (tr S), unbiased; empty unless `small` is the smaller batch."""
    if not 0 < small.samples < large.samples:
        return {}
    signal = (large.samples * large.squared - small.samples * small.squared) / (large.samples - small.samples)
    trace = (small.squared - large.squared) / (1 / small.samples - 1 / large.samples)
    return {"noise_signal": signal, "noise_trace": trace}


def gradient_norm(gradients: Iterable[Tensor], *, samples: float, divisor: float) -> GradientNorm | None:
    """Return the squared norm of `gradients` divided by `divisor`; None if there are none or they are not finite.

    `gradients` are the sums accumulated so far.
    """
    norms = [
        # squares in bfloat16 are too coarse
        whole(torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)))
        for gradient in gradients
    ]
    if not norms:
        return None
    squared = float(torch.stack(norms).double().square().sum()) / divisor**2
    return GradientNorm(samples=samples, squared=squared) if np.isfinite(squared) else None


def first_half(groups: npt.NDArray[np.int64]) -> int:
    """Return how many leading samples form whole groups and about half of all samples; all if there is one group.

    `groups` [n] names each sample's group; the samples of a group are adjacent.
    """
    starts = np.flatnonzero(np.diff(groups)) + 1
    if not len(starts):
        return len(groups)
    return int(starts[np.abs(starts - len(groups) / 2).argmin()])
