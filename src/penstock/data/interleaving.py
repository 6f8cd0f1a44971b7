"""Which part of a mixture comes next: a pure function of the position, so that the position is all there is to save.

Every beginning of the sequence is as close to the weights as whole items allow: with n parts, none is ever further from
its share than 1 - 1/(2n - 2) items, which no sequence can better for all weights (R. Tijdeman, "The chairman assignment
problem", Discrete Mathematics 32, 1980). A part that is used up leaves its share to the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd

Part = str


@dataclass(frozen=True, slots=True)
class _Phase:
    """A stretch in which the same parts take turns."""

    start: int
    """Position of its first item."""
    taken: Mapping[Part, int]
    """Items of each part before it."""
    period: Sequence[Part]
    """Repeated to the end of the phase."""
    numbers: Sequence[int]
    """Of each place of the period: items of its part before it, in the period."""
    counts: Mapping[Part, int]
    """Of each part in the period."""

    @classmethod
    def of(cls, weights: Mapping[Part, int], *, start: int, taken: Mapping[Part, int]) -> _Phase:
        common = gcd(*weights.values())
        counts = {part: weight // common for part, weight in weights.items()}
        period = chairmen(counts)
        seen = dict.fromkeys(counts, 0)
        numbers = []
        for part in period:
            numbers.append(seen[part])
            seen[part] += 1
        return cls(start, taken, period, numbers, counts)

    def at(self, position: int) -> tuple[Part, int]:
        rounds, place = divmod(position - self.start, len(self.period))
        part = self.period[place]
        return part, self.taken[part] + rounds * self.counts[part] + self.numbers[place]

    def end_of(self, part: Part, size: int) -> int:
        """Position after the last of `size` items of `part`."""
        rounds, rest = divmod(size - self.taken[part] - 1, self.counts[part])
        of_period = list(zip(self.period, self.numbers, strict=True))
        return self.start + rounds * len(self.period) + of_period.index((part, rest)) + 1

    def taken_until(self, position: int) -> dict[Part, int]:
        """Items of each part before `position`."""
        rounds, rest = divmod(position - self.start, len(self.period))
        begun = self.period[:rest]
        own = {part: rounds * count + begun.count(part) for part, count in self.counts.items()}
        return {part: number + own.get(part, 0) for part, number in self.taken.items()}


class Interleaving:
    """The order of a mixture: parts by weight, each with so many items, or without end (None)."""

    def __init__(self, weights: Mapping[Part, int], sizes: Mapping[Part, int | None]) -> None:
        left = {part: weight for part, weight in weights.items() if sizes[part] != 0}
        self._phases: list[_Phase] = []
        self.size: int | None = 0
        """Items in all; None without end."""
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
        """(part, number of the item in it) at `position`; None past the end."""
        if self.size is not None and position >= self.size:
            return None
        return self._phases[bisect_right(self._starts, position) - 1].at(position)


def chairmen(weights: Mapping[Part, int]) -> list[Part]:
    """One period of Tijdeman's sequence, as long as the sum of `weights`: each place goes to the part whose share would
    otherwise soonest be missed by too much, of those that have a place coming to them."""
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
