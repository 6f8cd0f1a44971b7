"""Measurement of when and how long the model computed. Busy fractions and the timeline use these intervals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from penstock.ports.observer import BusySpan

MERGE_GAP_S = 0.005
"""Intervals with a shorter pause between them are merged into one bar of the timeline."""


class BusyMeter:
    """Sums busy seconds on `clock` and merges neighbouring intervals. One thread writes; any thread may drain."""

    def __init__(self, process: str, clock: Callable[[], float]) -> None:
        self.busy_s = 0.0
        self._process, self._clock = process, clock
        self._spans: list[BusySpan] = []
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, kind: Literal["generate", "update_weights"], policy_version: int) -> Iterator[None]:
        """Measure the `with` body. Only generation counts as busy seconds."""
        start, before = time.time(), self._clock()
        try:
            yield
        finally:
            if kind == "generate":
                self.busy_s += self._clock() - before
            end = time.time()
            self._add(BusySpan(process=self._process, kind=kind, start=start, end=end, policy_version=policy_version))

    def _add(self, span: BusySpan) -> None:
        with self._lock:
            if self._spans and _continues(self._spans[-1], span):
                span = replace(self._spans.pop(), end=span.end)
            self._spans.append(span)

    def drain(self) -> list[BusySpan]:
        """Return all intervals since the last call. An interval that is still growing is cut here."""
        with self._lock:
            spans, self._spans = self._spans, []
            return spans


def _continues(last: BusySpan, span: BusySpan) -> bool:
    same = last.kind == span.kind and last.policy_version == span.policy_version
    return same and span.start - last.end < MERGE_GAP_S
