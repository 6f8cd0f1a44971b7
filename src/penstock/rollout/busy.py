"""How long the model was usefully busy, and when: the source of busy fractions and of the timeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from penstock.types import BusySpan

MERGE_GAP_S = 0.005
"""Work with shorter pauses in between is one bar of the timeline."""


class BusyMeter:
    """Sums busy seconds on `clock` and merges neighbouring intervals. Written by one thread, drained by any."""

    def __init__(self, process: str, clock: Callable[[], float]) -> None:
        self.busy_s = 0.0
        self._process = process
        self._clock = clock
        self._open: BusySpan | None = None
        self._closed: list[BusySpan] = []
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, kind: Literal["generate", "update_weights"], policy_version: int) -> Iterator[None]:
        """Account for the body; only generation counts as busy seconds."""
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
            last = self._open
            if last is not None and _continues(last, span):
                span = BusySpan(
                    process=last.process,
                    kind=last.kind,
                    start=last.start,
                    end=span.end,
                    policy_version=last.policy_version,
                )
            elif last is not None:
                self._closed.append(last)
            self._open = span

    def drain(self) -> list[BusySpan]:
        """Everything since the last call. An interval still growing is cut here."""
        with self._lock:
            spans = self._closed if self._open is None else [*self._closed, self._open]
            self._closed, self._open = [], None
            return spans


def _continues(last: BusySpan, span: BusySpan) -> bool:
    same = last.kind == span.kind and last.policy_version == span.policy_version
    return same and span.start - last.end < MERGE_GAP_S
