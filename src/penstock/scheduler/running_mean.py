"""The mean of the latest values."""

from __future__ import annotations

import msgspec


class RunningMean(msgspec.Struct):
    """An exponential average over about `steps` values. It is the plain mean at first, so that it starts unbiased."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, *, steps: int) -> None:
        self.count = min(self.count + 1, steps)
        self.value += (value - self.value) / self.count
