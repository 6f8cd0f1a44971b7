"""Why groups were dropped or failed, by the decisions of timeline.jsonl. The index of the timeline fills the table."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

DECIDERS = ("filter", "retry", "staleness")
"""Deciders by which groups are dropped, or played again."""
KEPT = "kept"
"""Reason of a filter that keeps a group."""
MAX_REASON = 300
"""Most characters of a reason in the table."""
MOST_GROUPS = 1 << 62

DropLine = tuple[int, str, bool]
"""Group, reason, and whether an attempt failed."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Why a group was dropped, and how many of its attempts failed."""

    reason: str | None = None
    num_failed: int = 0


class Drops:
    """A table with a line for each of these decisions, in their order: 13 bytes, and each reason once. Thread-safe."""

    def __init__(self) -> None:
        self._groups, self._reason_of, self._is_failure = array("q"), array("I"), array("B")
        self._texts: list[str] = []
        self._numbers: dict[str, int] = {}
        """Each reason, and its place in `_texts`."""
        self._lock = threading.Lock()

    def add(self, lines: Sequence[DropLine]) -> None:
        """Add decisions, the newest last."""
        with self._lock:
            for group, reason, is_failure in lines:
                if (number := self._numbers.setdefault(reason, len(self._texts))) == len(self._texts):
                    self._texts.append(reason)
                self._groups.append(group)
                self._reason_of.append(number)
                self._is_failure.append(is_failure)

    def of_group(self, group: int) -> Drop:
        """Return the latest reason of a group, and its failed attempts."""
        with self._lock:
            (places,) = np.nonzero(np.asarray(self._groups) == group)
            if not len(places):
                return Drop()
            num_failed = sum(self._is_failure[place] for place in places)
            return Drop(self._texts[self._reason_of[places[-1]]], num_failed)

    def with_reason(self, text: str) -> set[int]:
        """Return the groups with `text` in their latest reason, in lower case."""
        with self._lock:
            matching = [number for number, reason in enumerate(self._texts) if text in reason.lower()]
            if not matching:
                return set()
            newest_first = np.array(self._groups)[::-1]
            groups, latest = np.unique(newest_first, return_index=True)
            reasons = np.array(self._reason_of)[::-1][latest]
            return set(groups[np.isin(reasons, matching)].tolist())
