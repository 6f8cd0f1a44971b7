"""The gradient noise scale from two batch sizes (An Empirical Model of Large-Batch Training, arXiv 1812.06162).

The expected squared norm of a gradient averaged over B samples is |G|^2 + tr(S) / B: measured at two sizes, it gives
both terms. The small batch may be part of the large one, since only the expectations enter. Gradient accumulation
passes through both anyway, so measuring costs one norm. A single measurement is noisy and may even be negative: whoever
wants the scale B_simple = tr(S) / |G|^2 averages numerator and denominator apart.

The members of a group are compared with each other, so that their gradients are not independent; a small batch is
therefore made of whole groups. It is made of the first ones: where groups are trained as they become ready, those are
the shorter ones, and what sets them apart from the rest counts as noise too.
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
    """Of a mean gradient over some samples."""

    samples: int
    squared: float


def noise(small: GradientNorm, large: GradientNorm) -> dict[str, float]:
    """`noise_signal` (|G|^2) and `noise_trace` (tr S), unbiased; nothing if the batches are of one size."""
    if not 0 < small.samples < large.samples:
        return {}
    signal = (large.samples * large.squared - small.samples * small.squared) / (large.samples - small.samples)
    trace = (small.squared - large.squared) / (1 / small.samples - 1 / large.samples)
    return {"noise_signal": signal, "noise_trace": trace}


def gradient_norm(gradients: Iterable[Tensor], *, samples: int, divisor: int) -> GradientNorm | None:
    """Of gradients accumulated so far, sums that the step divides by `divisor`; None without any, or if they are not
    finite."""
    norms = [
        # the squares of bfloat16 are too coarse
        whole(torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32)))
        for gradient in gradients
    ]
    if not norms:
        return None
    squared = float(torch.stack(norms).double().square().sum()) / divisor**2
    return GradientNorm(samples=samples, squared=squared) if np.isfinite(squared) else None


def first_half(groups: npt.NDArray[np.int64]) -> int:
    """How many of the leading samples make whole groups and about half of all; all of them if there is one group.

    `groups` [n] names each sample's group; members are neighbours.
    """
    starts = np.flatnonzero(np.diff(groups)) + 1
    if not len(starts):
        return len(groups)
    return int(starts[np.abs(starts - len(groups) / 2).argmin()])
