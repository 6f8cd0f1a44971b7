"""Which policy version a modelled server served at which point of its token clock."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from operator import add

from penstock.types import NO_VERSION


class ServedVersions:
    """Grows with every weight update. A token that is made at `tau` is of the version served before that."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._since: list[int] = []
        """Token clock from which on each was served."""

    def add(self, version: int, tau: int) -> None:
        """`version` is served from `tau` on."""
        self._versions.append(version)
        self._since.append(tau)

    def between(self, starts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Versions of the first and the last of so many tokens, for each start of the token clock."""
        since, earliest = self._since, min(starts)
        named = [NO_VERSION, *self._versions]
        before = bisect_left(since, earliest + 1)
        if before == len(since) or since[before] >= max(map(add, starts, lengths)):
            return [(named[before], named[before])] * len(starts)
        lasts = [named[bisect_left(since, tau, before)] for tau in map(add, starts, lengths)]
        if earliest == max(starts):
            return [(named[before], last) for last in lasts]
        firsts = [named[bisect_left(since, start + 1, before)] for start in starts]
        return list(zip(firsts, lasts, strict=True))

    def since(self, version: int) -> int:
        """Token clock from which on `version`, or a newer one, was served; beyond all tokens if none was yet."""
        position = bisect_left(self._versions, version)
        return self._since[position] if position < len(self._since) else sys.maxsize
