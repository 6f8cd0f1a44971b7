"""Does what is trained look like what was played? Compares the lengths of the two, over the latest episodes.

Order, filters, staleness and over-sampling all favour some lengths: discarding late work under-trains slow, mostly hard
tasks (tinker-cookbook PR 822; Magistral, arXiv 2506.10910: the trained length distribution must match the data's).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

MIN_LENGTHS = 64
"""Below this many on either side a distance says nothing."""
CRITICAL = math.sqrt(-math.log(0.01 / 2) / 2)
"""Two-sample Kolmogorov-Smirnov test at 1 %: c = sqrt(-ln(alpha / 2) / 2), times sqrt((n + m) / (n m))."""


class LengthBias:
    """Response lengths of the latest `window` episodes played, and of the latest `window` trained."""

    def __init__(self, window: int = 2048) -> None:
        self._played: deque[int] = deque(maxlen=window)
        self._trained: deque[int] = deque(maxlen=window)

    def dispatched(self, lengths: Iterable[int]) -> None:
        """Episodes that finished, whatever became of them."""
        self._played.extend(lengths)

    def trained(self, lengths: Iterable[int]) -> None:
        """Those of them that an optimizer step used."""
        self._trained.extend(lengths)

    def report(self) -> dict[str, float | None]:
        """Percentiles of both and the distance between them; None where there is too little to tell."""
        trained, played = np.sort(self._trained), np.sort(self._played)
        return {
            "length_p50_trained": _percentile(trained, 50),
            "length_p90_trained": _percentile(trained, 90),
            "length_p50_played": _percentile(played, 50),
            "length_p90_played": _percentile(played, 90),
            "length_ks": _distance(trained, played),
        }

    def alarm(self, threshold: float = 0.1) -> str | None:
        """Why the trained lengths are not those played; None unless the distance is over `threshold` and over what
        chance explains at 1 %, members of a group being taken as independent."""
        found = self.report()
        distance = found["length_ks"]
        n, m = len(self._trained), len(self._played)
        if distance is None or distance <= max(threshold, CRITICAL * math.sqrt((n + m) / (n * m))):
            return None
        return (
            f"trained answers differ in length from those played: KS distance {distance:.3f} (threshold {threshold:g}),"
            f" median {found['length_p50_trained']:g} against {found['length_p50_played']:g} tokens,"
            f" P90 {found['length_p90_trained']:g} against {found['length_p90_played']:g}"
        )


def _percentile(ordered: npt.NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(ordered, percent)) if len(ordered) else None


def _distance(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float | None:
    """Largest difference between two empirical distribution functions; both sorted."""
    if min(len(one), len(other)) < MIN_LENGTHS:
        return None
    steps = np.concatenate((one, other))
    below = np.searchsorted(one, steps, side="right") / len(one)
    other_below = np.searchsorted(other, steps, side="right") / len(other)
    return float(np.abs(below - other_below).max())
