"""Distances between policy versions.

A version is a number that is never reused, so weights that are restored get a new one: after the loss of a trainer at
version 10, the weights of version 5 are also those of version 11. Versions then form a tree, in which 11 continues 5
and 6 to 10 are a branch that nothing continues. The numbers 10 and 11 differ by one, and five optimizer steps lie
between their weights.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]


class VersionHistory(msgspec.Struct, frozen=True):
    """The restored versions of a run."""

    restored: dict[int, int] = {}
    """For each restored version, the earlier version that has the same weights."""

    def with_restored(self, version: int, *, weights_of: int) -> VersionHistory:
        """Return the history after `version` was given to the weights of an earlier version."""
        return VersionHistory({**self.restored, version: weights_of})

    def steps_between(self, earlier: int, later: int) -> int:
        """Return the number of optimizer steps between the weights of two versions. It is negative if `earlier` is the
        larger number: a version that the trainer of `later` has not made."""
        if not self.restored or earlier >= later:
            return later - earlier
        steps = 0
        while (first := self._first_of(max(earlier, later))) is not None and first > min(earlier, later):
            steps += max(earlier, later) - first
            earlier, later = min(earlier, later), self.restored[first]
        return steps + abs(later - earlier)

    def least_steps(self, earliest: int, latest: int, later: int) -> int:
        """Return the least number of optimizer steps between `later` and any version from `earliest` to `latest`."""
        if not self.restored:
            return later - latest
        turns = {each for first, same in self.restored.items() for each in (first - 1, first, same)}
        nearest = {earliest, latest, *(each for each in turns if earliest < each < latest)}
        return min(self.steps_between(each, later) for each in nearest)

    def renumbered(self, versions: Ints, later: int) -> Ints:
        """Return a new number for each version: `later` minus the number of optimizer steps between the two. Negative
        versions, of tokens that no policy sampled, stay."""
        if not self.restored:
            return versions
        found, places = np.unique(versions, return_inverse=True)
        numbers = [later - self.steps_between(int(each), later) if each >= 0 else int(each) for each in found]
        return np.asarray(numbers, dtype=versions.dtype)[places].reshape(versions.shape)

    def _first_of(self, version: int) -> int | None:
        """Return the restored version that `version` continues; None if it continues the beginning of the run."""
        return max((first for first in self.restored if first <= version), default=None)
