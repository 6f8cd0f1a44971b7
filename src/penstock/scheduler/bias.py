"""Length bias: compares the response lengths of trained episodes with those of all admitted and all played episodes.

Dispatch order, filters, staleness and over-sampling all favour some lengths. For example, discarding late work
under-trains slow tasks, which are mostly hard (tinker-cookbook PR 822). The trained length distribution must match that
of the data (Magistral, arXiv 2506.10910). The predicted length stands in for the real lengths of a group until the
group is complete; so a group that never starts counts too. A group of equal rewards does not count as admitted: it has
no gradient, so that dropping it favours no length.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from statistics import fmean

import numpy as np
import numpy.typing as npt

LATEST_STEPS = 20
"""Optimizer steps over which the distance is averaged for the alarm."""
MIN_LENGTHS = 64
"""Fewest lengths on each side for a meaningful distance."""
CRITICAL = math.sqrt(-math.log(0.01 / 2) / 2)
"""c = sqrt(-ln(alpha / 2) / 2) at alpha = 1 %. The critical distance of the two-sample Kolmogorov-Smirnov test is
c * sqrt((n + m) / (n m))."""


class LengthBias:
    """Lengths of the latest `window` admitted, played and trained episodes. The `look_ahead` newest groups do not count
    as admitted: they may still wait for their turn."""

    def __init__(self, *, group_size: int, look_ahead: int, window: int = 2048) -> None:
        self._group_size, self.look_ahead = group_size, look_ahead
        self._num_groups = max(window // group_size, 1)
        self._admitted: OrderedDict[int, Sequence[float]] = OrderedDict()
        """Lengths by group, in the order of admission; empty if a group has neither lengths nor a prediction."""
        self._played: deque[float] = deque(maxlen=window)
        self._trained: deque[float] = deque(maxlen=window)
        self._distances: deque[float] = deque(maxlen=LATEST_STEPS)
        """Between trained and admitted lengths, at the latest optimizer steps."""

    def admitted(self, group: int, predicted_tokens: float | None) -> None:
        """Record an admitted group. `predicted_tokens` is the expected length of its episodes; None without a
        prediction."""
        self._admitted[group] = () if predicted_tokens is None else (predicted_tokens,) * self._group_size
        while len(self._admitted) > self._num_groups + self.look_ahead:
            self._admitted.popitem(last=False)

    def played(self, group: int, lengths: Sequence[int]) -> None:
        """Record the lengths of a completed group, whether it is trained later or not."""
        self._played.extend(lengths)
        if group in self._admitted:
            self._admitted[group] = lengths

    def equal_rewards(self, group: int) -> None:
        """Remove a group from the admitted ones: its rewards are equal, so that training on it would change nothing."""
        self._admitted.pop(group, None)

    def trained(self, lengths: Iterable[int]) -> None:
        """Record the lengths of episodes that an optimizer step used."""
        self._trained.extend(lengths)

    def report(self) -> dict[str, float | None]:
        """Return percentiles and Kolmogorov-Smirnov distances; None where there are too few lengths."""
        trained, played, admitted = np.sort(self._trained), np.sort(self._played), np.sort(self._population())
        return {
            "length_p50_trained": _percentile(trained, 50),
            "length_p90_trained": _percentile(trained, 90),
            "length_p50_admitted": _percentile(admitted, 50),
            "length_p90_admitted": _percentile(admitted, 90),
            "length_ks": _distance(trained, admitted),
            "length_ks_played": _distance(trained, played),
        }

    def check_step(self, threshold: float = 0.1) -> str | None:
        """Return how the trained lengths differ from the data's after an optimizer step; None while the difference is
        small.

        The difference is large if the mean distance at the latest steps exceeds both `threshold` and the critical
        distance at 1 %. The test counts the members of a group as one observation.
        """
        found = self.report()
        if (distance := found["length_ks"]) is None:
            return None
        self._distances.append(distance)
        lasting = fmean(self._distances)
        n, m = (size / self._group_size for size in (len(self._trained), len(self._population())))
        if lasting <= max(threshold, critical_distance(n, m)):
            return None
        return (
            f"trained answers differ in length from the data's: mean KS distance {lasting:.3f} at the latest "
            f"{len(self._distances)} steps (threshold {threshold:g}), now median {found['length_p50_trained']:g} "
            f"against {found['length_p50_admitted']:g} tokens, P90 {found['length_p90_trained']:g} against "
            f"{found['length_p90_admitted']:g}"
        )

    def _population(self) -> list[float]:
        settled = max(len(self._admitted) - self.look_ahead, 0)
        return list(chain.from_iterable(islice(self._admitted.values(), settled)))


def _percentile(ordered: npt.NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(ordered, percent)) if len(ordered) else None


def critical_distance(n: float, m: float) -> float:
    """Return the distance that two samples of `n` and `m` from one distribution exceed in 1 % of cases."""
    return CRITICAL * math.sqrt((n + m) / (n * m))


def ks_distance(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Return the largest difference between the empirical distribution functions of two sorted arrays."""
    points = np.concatenate((one, other))
    shares = (np.searchsorted(side, points, side="right") / len(side) for side in (one, other))
    return float(np.abs(np.subtract(*shares)).max())


def _distance(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float | None:
    return ks_distance(one, other) if min(len(one), len(other)) >= MIN_LENGTHS else None
