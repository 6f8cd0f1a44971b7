"""A queue that orders entries by length (shortest or longest first) and by age.

    score = sign * factor * tokens / scale + since / aging_s          lowest first; scale is the mean of `tokens`

Aging is linear and equal for all entries. So a score never changes while its entry waits, and a heap of scores is
enough. With factor 0, the order is that of `since`. `number` breaks ties between equal scores and between equal ages.

`aging_s` and the longest wait may be multiples of the queue's mean wait. By Little's law, this mean is the number of
waiting entries divided by the rate at which they leave, whatever their order. It is unknown, and nothing ages, until
as many entries have left as ever waited at once: the first ones leave at once, because everything is idle.

Only the `look_ahead` oldest entries compete; they are the window. Other entries wait in the backlog, and enter the
window as entries leave it. The heaps may hold entries that have left the window. The queue skips them, and removes them
once they are the majority.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from penstock.config.waits import wait_time

T = TypeVar("T")

SCALE_WINDOW = 1024  # approximate number of pushes in the running mean of `tokens`
SCALE_TOLERANCE = 0.2  # relative drift of a mean after which scores are computed again
FEWEST_LEFT, MOST_LEFT = 16, 1024  # bounds of the number of latest departures that count
SWEEP_SLACK = 1024  # a heap may hold twice the window and this many entries more


class Waiting(msgspec.Struct, Generic[T], frozen=True, order=True, gc=False):
    """An entry; entries compare by age. `serial` is unique, so a comparison never reaches `tokens` and `item`.

    The garbage collector does not scan entries: no item refers to its entry.
    """

    since: float
    number: int
    serial: int
    tokens: float
    item: T


class Order(Generic[T]):
    """The waiting entries, and the next of them."""

    def __init__(self, *, sign: int, aging: str, max_wait: str, look_ahead: int) -> None:
        """`sign` is 1 for shortest first, -1 for longest first, 0 for oldest first. `aging` and `max_wait` are settings
        of `scheduler.dispatch`."""
        self._sign, self._look_ahead = sign, look_ahead
        self._aging, self._max_wait = wait_time(aging), wait_time(max_wait)
        self._left: deque[float] = deque(maxlen=_num_departures(look_ahead))  # times of departures
        self._num_left, self._most_waiting = 0, 0
        self._is_relative = self._aging.is_relative or self._max_wait.is_relative
        self.aging_s, self.max_wait_s = self._aging.seconds(math.inf), self._max_wait.seconds(math.inf)
        self._factor, self._mean, self._weight = 1.0, 0.0, 0.0
        self.scale = 0.0  # tokens that weigh as much as `aging_s`, at factor 1
        self._num_pushed = 0
        self._window: dict[int, Waiting[T]] = {}
        self._youngest: Waiting[T] | None = None  # youngest entry that is or was in the window
        self._ages: list[Waiting[T]] = []  # heap
        self._scores: list[tuple[float, Waiting[T]]] = []  # heap
        self._backlog: list[Waiting[T]] = []  # heap; empty unless the window is full
        self._outdated = False

    def push(self, item: T, *, number: int, since: float, tokens: float) -> None:
        """Add `item`. Its waiting time starts at `since`."""
        self._num_pushed += 1
        self._most_waiting = max(self._most_waiting, len(self) + 1)
        waiting = Waiting(since, number, self._num_pushed, tokens, item)
        self._mean += (tokens - self._mean) / min(self._num_pushed, SCALE_WINDOW)
        if self._sign and abs(self._mean - self.scale) > SCALE_TOLERANCE * self.scale:
            self._outdated = True
        if len(self._window) < self._look_ahead:
            self._enter(waiting)
            return
        heappush(self._backlog, waiting)
        if self._youngest is not None and waiting < self._youngest:
            self._outdated = True

    def next(self, now: float) -> tuple[Waiting[T], bool] | None:
        """Return the next entry, and True if it is next because it has waited `max_wait_s`; None without entries."""
        oldest = self.oldest()
        if oldest is None:
            return None
        if now - oldest.since >= self.max_wait_s:
            return oldest, True
        while self._scores[0][1].serial not in self._window:
            heappop(self._scores)
        return self._scores[0][1], False

    def oldest(self) -> Waiting[T] | None:
        """Return the entry that has waited longest; None without entries."""
        if self._outdated or max(len(self._ages), len(self._scores)) > 2 * len(self._window) + SWEEP_SLACK:
            self._rebuild()
        while self._ages and self._ages[0].serial not in self._window:
            heappop(self._ages)
        return self._ages[0] if self._ages else None

    def take(self, waiting: Waiting[T], now: float) -> None:
        """Remove the entry that `next` returned."""
        self._num_left += 1
        self._left.append(now)
        if self._is_relative and self._num_left >= self._most_waiting + FEWEST_LEFT and now > self._left[0]:
            self._scale_waits(len(self) * (now - self._left[0]) / (len(self._left) - 1))
        del self._window[waiting.serial]
        if self._backlog:
            self._enter(heappop(self._backlog))

    def adapt(self, factor: float) -> None:
        """Multiply the weight of lengths by `factor` from now on. Raises `ValueError` unless it is >= 0."""
        if not factor >= 0:
            raise ValueError(f"lengths cannot count {factor} times")
        if self._sign and factor != self._factor:
            self._factor = factor
            self._outdated = True

    def change(self, *, sign: int, look_ahead: int) -> None:
        """Order all entries, also those that wait, by another sign and in another window."""
        if (sign, look_ahead) != (self._sign, self._look_ahead):
            self._sign, self._look_ahead = sign, look_ahead
            self._left = deque(self._left, maxlen=_num_departures(look_ahead))
            self._outdated = True

    def revise(self, tokens: Mapping[int, float]) -> None:
        """Replace the `tokens` of entries; the mapping is by `number`."""
        revised = [replace(waiting, tokens=tokens.get(waiting.number, waiting.tokens)) for waiting in self.waiting()]
        self._window, self._backlog = {waiting.serial: waiting for waiting in revised}, []
        if revised:
            self._mean = sum(waiting.tokens for waiting in revised) / len(revised)
        self._outdated = True  # `_rebuild` moves the youngest entries back to the backlog

    def waiting(self) -> list[Waiting[T]]:
        """Return all entries, in arbitrary order."""
        return [*self._window.values(), *self._backlog]

    def __len__(self) -> int:
        return len(self._window) + len(self._backlog)

    def _scale_waits(self, mean_wait_s: float) -> None:
        """Set the waits that are multiples of the mean wait."""
        self.max_wait_s = self._max_wait.seconds(mean_wait_s)
        aging_s = self._aging.seconds(mean_wait_s)
        if self.aging_s == math.inf or abs(aging_s - self.aging_s) > SCALE_TOLERANCE * self.aging_s:
            self.aging_s = aging_s
            self._outdated = self._outdated or bool(self._sign)

    def _enter(self, waiting: Waiting[T]) -> None:
        self._window[waiting.serial] = waiting
        if self._youngest is None or waiting > self._youngest:
            self._youngest = waiting
        heappush(self._ages, waiting)
        heappush(self._scores, (self._score(waiting), waiting))

    def _score(self, waiting: Waiting[T]) -> float:
        if not self._sign:
            return waiting.since
        return self._weight * waiting.tokens + waiting.since / self.aging_s

    def _rebuild(self) -> None:
        """Rebuild window, backlog and scores, after the scale or the factor changed or an old entry arrived late."""
        self.scale = self._mean
        self._weight = self._sign * self._factor / self.scale if self.scale > 0 else 0.0
        entries = sorted([*self._window.values(), *self._backlog])
        self._ages, self._backlog = entries[: self._look_ahead], entries[self._look_ahead :]
        self._window = {waiting.serial: waiting for waiting in self._ages}
        self._youngest = self._ages[-1] if self._ages else None
        self._scores = [(self._score(waiting), waiting) for waiting in self._ages]
        heapify(self._scores)
        self._outdated = False


def _num_departures(look_ahead: int) -> int:
    """Return the number of latest departures from which the rate is taken."""
    return min(max(look_ahead, FEWEST_LEFT), MOST_LEFT)
