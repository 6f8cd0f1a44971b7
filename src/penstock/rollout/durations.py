"""How long things took, as a histogram that costs next to nothing to keep."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Durations:
    """Written by one thread, read by any."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """How many took at most as long as each bound, as Prometheus writes them; the last one is everything."""
        found, total = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), tuple(self._counts), strict=True):
            total += count
            found.append((bound, float(total)))
        return found
