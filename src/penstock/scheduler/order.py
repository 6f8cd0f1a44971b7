"""The order of what waits: shortest or longest first, softened by aging, within a window of the oldest.

    score = sign * factor * tokens / scale + since / aging_s          lowest first; scale is the mean of `tokens`

Aging is linear and the same for all, so a score never changes while its entry waits and a heap of scores is enough.
With factor 0 the order is that of `since`. Equal scores, and equal ages, go by `number`.

Only the `look_ahead` oldest entries, the window, compete; the others move up as entries leave. Heaps may hold entries
that have left the window: they are skipped, and swept when they are the majority.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

SCALE_WINDOW = 1024  # pushes the running mean of `tokens` remembers, roughly
SCALE_TOLERANCE = 0.2  # relative drift of the mean that is worth new scores
SWEEP_SLACK = 1024  # entries a heap may hold in excess of twice the window


class Waiting(NamedTuple, Generic[T]):
    """An entry; compares by age. `serial` is unique, so that comparison never reaches what follows it."""

    since: float
    number: int
    serial: int
    tokens: float
    item: T


class Order(Generic[T]):
    """Entries that wait, and which of them is next."""

    def __init__(self, *, sign: int, aging_s: float, max_wait_s: float, look_ahead: int) -> None:
        """`sign` is 1 for shortest first, -1 for longest first, 0 for oldest first."""
        self._sign, self._aging_s, self._max_wait_s, self._look_ahead = sign, aging_s, max_wait_s, look_ahead
        self._factor, self._mean, self._scale, self._weight = 1.0, 0.0, 0.0, 0.0
        self._num_pushed = 0
        self._window: dict[int, Waiting[T]] = {}
        self._youngest: Waiting[T] | None = None  # no entry of the window is younger
        self._ages: list[Waiting[T]] = []  # heap
        self._scores: list[tuple[float, Waiting[T]]] = []  # heap
        self._backlog: list[Waiting[T]] = []  # heap; empty unless the window is full
        self._outdated = False

    @property
    def scale(self) -> float:
        """Tokens that weigh as much as `aging_s`, at factor 1."""
        return self._scale

    def push(self, item: T, *, number: int, since: float, tokens: float) -> None:
        """`item` waits since `since`."""
        self._num_pushed += 1
        waiting = Waiting(since, number, self._num_pushed, tokens, item)
        self._mean += (tokens - self._mean) / min(self._num_pushed, SCALE_WINDOW)
        if self._sign and abs(self._mean - self._scale) > SCALE_TOLERANCE * self._scale:
            self._outdated = True
        if len(self._window) < self._look_ahead:
            self._enter(waiting)
            return
        heappush(self._backlog, waiting)
        if self._youngest is not None and waiting < self._youngest:
            self._outdated = True

    def next(self, now: float) -> tuple[Waiting[T], bool] | None:
        """The entry to take next, and whether that is so only because it has waited `max_wait_s`."""
        oldest = self.oldest()
        if oldest is None:
            return None
        if now - oldest.since >= self._max_wait_s:
            return oldest, True
        while self._scores[0][1].serial not in self._window:
            heappop(self._scores)
        return self._scores[0][1], False

    def oldest(self) -> Waiting[T] | None:
        """The entry that has waited longest."""
        if self._outdated or max(len(self._ages), len(self._scores)) > 2 * len(self._window) + SWEEP_SLACK:
            self._rebuild()
        while self._ages and self._ages[0].serial not in self._window:
            heappop(self._ages)
        return self._ages[0] if self._ages else None

    def take(self, waiting: Waiting[T]) -> None:
        """Take out what `next` returned."""
        del self._window[waiting.serial]
        if self._backlog:
            self._enter(heappop(self._backlog))

    def adapt(self, factor: float) -> None:
        """Let lengths count `factor` times from now on."""
        if not factor >= 0:
            raise ValueError(f"lengths cannot count {factor} times")
        if self._sign and factor != self._factor:
            self._factor = factor
            self._outdated = True

    def revise(self, tokens: Mapping[int, float]) -> None:
        """New `tokens` for the entries with these numbers."""
        for waiting in self.waiting():
            if waiting.number in tokens:
                self._replace(waiting, waiting._replace(tokens=tokens[waiting.number]))
        if len(self):
            self._mean = sum(waiting.tokens for waiting in self.waiting()) / len(self)
        self._outdated = True

    def waiting(self) -> list[Waiting[T]]:
        """All entries, in no order."""
        return [*self._window.values(), *self._backlog]

    def _replace(self, old: Waiting[T], new: Waiting[T]) -> None:
        if old.serial in self._window:
            self._window[old.serial] = new
        else:
            self._backlog[self._backlog.index(old)] = new  # its age is the same: still a heap

    def __len__(self) -> int:
        return len(self._window) + len(self._backlog)

    def _enter(self, waiting: Waiting[T]) -> None:
        self._window[waiting.serial] = waiting
        if self._youngest is None or waiting > self._youngest:
            self._youngest = waiting
        heappush(self._ages, waiting)
        heappush(self._scores, (self._score(waiting), waiting))

    def _score(self, waiting: Waiting[T]) -> float:
        return self._weight * waiting.tokens + waiting.since / self._aging_s

    def _rebuild(self) -> None:
        """Window, backlog and scores anew: the scale or the factor moved, or an old entry came late."""
        self._scale = self._mean
        self._weight = self._sign * self._factor / self._scale if self._scale > 0 else 0.0
        entries = sorted([*self._window.values(), *self._backlog])
        self._ages, self._backlog = entries[: self._look_ahead], entries[self._look_ahead :]
        self._window = {waiting.serial: waiting for waiting in self._ages}
        self._youngest = self._ages[-1] if self._ages else None
        self._scores = [(self._score(waiting), waiting) for waiting in self._ages]
        heapify(self._scores)
        self._outdated = False
