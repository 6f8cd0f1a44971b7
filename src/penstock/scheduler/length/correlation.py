"""Whether predictions rank well: Kendall's tau-b over the latest pairs."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence

FEWEST_PAIRS = 16
REFRESH_EVERY = 16  # additions


class RankCorrelation:
    """Kendall's tau-b of (predicted, actual) over a sliding window, taken anew every `REFRESH_EVERY` additions."""

    def __init__(self, window: int) -> None:
        self._pairs: deque[tuple[float, float]] = deque(maxlen=window)
        self._num_added = 0
        self._tau: float | None = None

    def add(self, predicted: float, actual: float) -> None:
        self._pairs.append((predicted, actual))
        self._num_added += 1
        if self._num_added % REFRESH_EVERY == 0 and len(self._pairs) >= FEWEST_PAIRS:
            self._tau = kendall_tau(self._pairs)

    @property
    def tau(self) -> float | None:
        """Of the pairs there were at the last refresh; None below `FEWEST_PAIRS`."""
        return self._tau

    def __len__(self) -> int:
        return len(self._pairs)


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Tau-b by Knight's method: sort by the first, count inversions of the second; 0 if either is constant."""
    ordered = sorted(pairs)
    total = math.comb(len(ordered), 2)
    ties = [_tied(first for first, _ in ordered), _tied(second for _, second in ordered), _tied(ordered)]
    pairs_of_each = (total - ties[0]) * (total - ties[1])
    if pairs_of_each == 0:
        return 0.0
    difference = total - ties[0] - ties[1] + ties[2] - 2 * _inversions([second for _, second in ordered])
    return difference / math.sqrt(pairs_of_each)


def _tied(values: Iterable[Hashable]) -> int:
    """Pairs of equal values."""
    return sum(math.comb(count, 2) for count in Counter(values).values())


def _inversions(values: Sequence[float]) -> int:
    """Pairs in descending order."""
    seen: list[float] = []
    inversions = 0
    for value in values:
        inversions += len(seen) - bisect_right(seen, value)
        insort(seen, value)
    return inversions
