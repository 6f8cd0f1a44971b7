"""Trust: whether predicted lengths rank tasks well enough to order tasks by them."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence

from penstock.config import LengthConfig

FEWEST_PAIRS = 16
REFRESH_EVERY = 16  # additions
MARGIN = 0.05  # distrusted lengths are trusted again from min_tau + MARGIN on


class Trust:
    """Trust in predicted lengths. It is lost one standard error below `min_tau`, and regained at `min_tau` + `MARGIN`.

    The measure is Kendall's tau-b of (predicted, actual) over a sliding window, recomputed every `REFRESH_EVERY`
    additions. Lengths are trusted until there are `FEWEST_PAIRS` pairs.
    """

    def __init__(self, config: LengthConfig) -> None:
        self._min_tau = config.min_tau
        self._pairs: deque[tuple[float, float]] = deque(maxlen=config.window)
        self._num_added = 0
        self.tau: float | None = None
        """Tau-b at the last refresh; None while there are too few pairs."""
        self.trusted = True

    def add(self, predicted: float, actual: float) -> None:
        """Record that a task with `predicted` tokens took `actual` tokens."""
        self._pairs.append((predicted, actual))
        self._num_added += 1
        if self._num_added % REFRESH_EVERY == 0 and len(self._pairs) >= FEWEST_PAIRS:
            self.tau = kendall_tau(self._pairs)
            slack = -standard_error(len(self._pairs)) if self.trusted else MARGIN  # a few groups prove little
            self.trusted = self.tau >= self._min_tau + slack

    @property
    def alarm(self) -> str | None:
        """Return the alarm about predicted lengths that are not trusted; None until the window is full, because a
        predictor has learned nothing at first."""
        return None if self.trusted or len(self._pairs) < (self._pairs.maxlen or 0) else self.reason

    @property
    def reason(self) -> str:
        """Return why predicted lengths are trusted or not."""
        groups = len(self._pairs)
        if self.tau is None:
            return f"too few groups to judge predicted lengths ({groups}): trusted"
        found = f"Kendall tau {self.tau:.2f} over {groups} groups"
        if self.trusted:
            within = "at least" if self.tau >= self._min_tau else "within its standard error of"
            return f"{found} is {within} {self._min_tau:g}: predicted lengths are trusted"
        needed = "" if self.tau < self._min_tau else f" + {MARGIN:g}, needed to be trusted again"
        return f"{found} is below {self._min_tau:g}{needed}: first come, first served"


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return tau-b by Knight's method; 0 if all first or all second values are equal.

    The method sorts pairs by the first value and counts inversions of the second.
    """
    ordered = sorted(pairs)
    total = math.comb(len(ordered), 2)
    ties = [_tied(first for first, _ in ordered), _tied(second for _, second in ordered), _tied(ordered)]
    pairs_of_each = (total - ties[0]) * (total - ties[1])
    if pairs_of_each == 0:
        return 0.0
    difference = total - ties[0] - ties[1] + ties[2] - 2 * _inversions([second for _, second in ordered])
    return difference / math.sqrt(pairs_of_each)


def standard_error(num_pairs: int) -> float:
    """Return the standard deviation of tau over pairs without any relation (Kendall 1938)."""
    return math.sqrt(2 * (2 * num_pairs + 5) / (9 * num_pairs * (num_pairs - 1)))


def _tied(values: Iterable[Hashable]) -> int:
    """Return the number of pairs of equal values."""
    return sum(math.comb(count, 2) for count in Counter(values).values())


def _inversions(values: Sequence[float]) -> int:
    """Return the number of pairs in descending order."""
    seen: list[float] = []
    inversions = 0
    for value in values:
        inversions += len(seen) - bisect_right(seen, value)
        insort(seen, value)
    return inversions
