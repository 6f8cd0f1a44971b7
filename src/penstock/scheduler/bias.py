"""Does what is trained look like the data? Compares the response lengths of trained episodes with those of all that
were admitted, and with those of all that were played.

Order, filters, staleness and over-sampling all favour some lengths: discarding late work under-trains slow, mostly hard
tasks (tinker-cookbook PR 822; Magistral, arXiv 2506.10910: the trained length distribution must match the data's). Of a
group that is not played yet, as of one that starves, the predicted length stands in for the real ones.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

MIN_LENGTHS = 64
"""Below this many on either side a distance says nothing."""
CRITICAL = math.sqrt(-math.log(0.01 / 2) / 2)
"""Two-sample Kolmogorov-Smirnov test at 1 %: c = sqrt(-ln(alpha / 2) / 2), times sqrt((n + m) / (n m))."""


class LengthBias:
    """Over the latest `window` episodes of each kind. The `look_ahead` newest groups are not held against the order:
    they have had no turn yet."""

    def __init__(self, *, group_size: int, look_ahead: int, window: int = 2048) -> None:
        self._group_size, self._look_ahead = group_size, look_ahead
        self._num_groups = max(window // group_size, 1)
        self._admitted: OrderedDict[int, Sequence[float]] = OrderedDict()
        """Lengths by group in the order of admission; empty while nothing is known."""
        self._played: deque[float] = deque(maxlen=window)
        self._trained: deque[float] = deque(maxlen=window)

    def admitted(self, group: int, predicted_tokens: float | None) -> None:
        """A group was taken in; what it is expected to take, if anything is."""
        self._admitted[group] = () if predicted_tokens is None else (predicted_tokens,) * self._group_size
        while len(self._admitted) > self._num_groups + self._look_ahead:
            self._admitted.popitem(last=False)

    def played(self, group: int, lengths: Sequence[int]) -> None:
        """A group was played to its end, whatever became of it then."""
        self._played.extend(lengths)
        if group in self._admitted:
            self._admitted[group] = lengths

    def trained(self, lengths: Iterable[int]) -> None:
        """Episodes that an optimizer step used."""
        self._trained.extend(lengths)

    def report(self) -> dict[str, float | None]:
        """Percentiles and Kolmogorov-Smirnov distances; None where there is too little to tell."""
        trained, played, admitted = np.sort(self._trained), np.sort(self._played), np.sort(self._population())
        return {
            "length_p50_trained": _percentile(trained, 50),
            "length_p90_trained": _percentile(trained, 90),
            "length_p50_admitted": _percentile(admitted, 50),
            "length_p90_admitted": _percentile(admitted, 90),
            "length_ks": _distance(trained, admitted),
            "length_ks_played": _distance(trained, played),
        }

    def alarm(self, threshold: float = 0.1) -> str | None:
        """Why the trained lengths are not the data's; None unless the distance is over `threshold` and over what chance
        explains at 1 %, the members of a group counting as one."""
        found = self.report()
        distance = found["length_ks"]
        n, m = (size / self._group_size for size in (len(self._trained), len(self._population())))
        if distance is None or distance <= max(threshold, CRITICAL * math.sqrt((n + m) / (n * m))):
            return None
        return (
            f"trained answers differ in length from the data's: KS distance {distance:.3f} (threshold {threshold:g}),"
            f" median {found['length_p50_trained']:g} against {found['length_p50_admitted']:g} tokens,"
            f" P90 {found['length_p90_trained']:g} against {found['length_p90_admitted']:g}"
        )

    def _population(self) -> list[float]:
        settled = max(len(self._admitted) - self._look_ahead, 0)
        return list(chain.from_iterable(islice(self._admitted.values(), settled)))


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
