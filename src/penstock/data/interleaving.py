"""The order in which the parts of a mixture take turns: a pure function of the position.

A checkpoint therefore saves only the position. Every prefix of the sequence is as close to the weights as whole items
allow: with n parts, each part stays within 1 - 1/(2n - 2) items of its share. No sequence has a smaller bound for all
weights (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). When a part is used up, the
remaining parts divide its share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from math import gcd

Part = str


@dataclass(frozen=True, slots=True)
class _Phase:
    """A stretch of the sequence in which the same parts take turns."""

    start: int
    """Position of the phase's first item."""
    taken: Mapping[Part, int]
    """Items of each part before the phase."""
    period: Sequence[Part]
    """Parts in order; the phase repeats this list until it ends."""
    numbers: Sequence[int]
    """For each place of the period: how many items of the same part come earlier in the period."""
    counts: Mapping[Part, int]
    """Items of each part in one period."""

    @classmethod
    def of(cls, weights: Mapping[Part, int], *, start: int, taken: Mapping[Part, int]) -> _Phase:
        common = gcd(*weights.values())
        counts = {part: weight // common for part, weight in weights.items()}
        period = chairmen(counts)
        numbers = {part: count() for part in counts}
        return cls(start, taken, period, [next(numbers[part]) for part in period], counts)

    def at(self, position: int) -> tuple[Part, int]:
        rounds, place = divmod(position - self.start, len(self.period))
        part = self.period[place]
        return part, self.taken[part] + rounds * self.counts[part] + self.numbers[place]

    def end_of(self, part: Part, size: int) -> int:
        """Return the position after the last of `size` items of `part`."""
        rounds, rest = divmod(size - self.taken[part] - 1, self.counts[part])
        of_period = list(zip(self.period, self.numbers, strict=True))
        return self.start + rounds * len(self.period) + of_period.index((part, rest)) + 1

    def taken_until(self, position: int) -> dict[Part, int]:
        """Return how many items of each part come before `position`."""
        rounds, rest = divmod(position - self.start, len(self.period))
        begun = self.period[:rest]
        own = {part: rounds * count + begun.count(part) for part, count in self.counts.items()}
        return {part: number + own.get(part, 0) for part, number in self.taken.items()}


class Interleaving:
    """The order of a mixture. Each part has a weight and a size; size None means an endless part."""

    def __init__(self, weights: Mapping[Part, int], sizes: Mapping[Part, int | None]) -> None:
        left = {part: weight for part, weight in weights.items() if sizes[part] != 0}
        self._phases: list[_Phase] = []
        self.size: int | None = 0
        """Total number of items; None if the mixture is endless."""
        taken = dict.fromkeys(left, 0)
        while left and self.size is not None:
            phase = _Phase.of(left, start=self.size, taken=taken)
            self._phases.append(phase)
            self.size = min((phase.end_of(part, size) for part in left if (size := sizes[part])), default=None)
            if self.size is not None:
                taken = phase.taken_until(self.size)
                left = {part: weight for part, weight in left.items() if taken[part] != sizes[part]}
        self._starts = [phase.start for phase in self._phases]

    def at(self, position: int) -> tuple[Part, int] | None:
        """Return (part, item number within the part) at `position`; None past the end."""
        if self.size is not None and position >= self.size:
            return None
        return self._phases[bisect_right(self._starts, position) - 1].at(position)


def chairmen(weights: Mapping[Part, int]) -> list[Part]:
    """Return one period of Tijdeman's sequence; its length is the sum of `weights`.

    At each place, a part is eligible if its share exceeds its items so far by at least 1/(2n - 2). The place goes to
    the eligible part that would soonest violate the upper bound 1 - 1/(2n - 2).
    """
    total, num = sum(weights.values()), len(weights)
    if num == 1:
        return list(weights) * total
    least = Fraction(1, 2 * num - 2)
    taken = dict.fromkeys(weights, 0)
    period = []
    for place in range(1, total + 1):
        due = {part: Fraction(weight * place, total) - taken[part] for part, weight in weights.items()}
        coming = [part for part in weights if due[part] >= least]
        chosen = min(coming, key=lambda part: (1 - least - due[part]) / weights[part])
        taken[chosen] += 1
        period.append(chosen)
    return period
