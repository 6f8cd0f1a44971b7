"""Whether lengths known beforehand rank tasks well enough to order by them."""

from __future__ import annotations

from penstock.config import LengthConfig
from penstock.scheduler.length.correlation import RankCorrelation

MARGIN = 0.05  # above min_tau, from which on what was distrusted is trusted again


class Trust:
    """Lost below `min_tau`, regained a margin above it; given freely until there is a correlation."""

    def __init__(self, config: LengthConfig) -> None:
        self._min_tau = config.min_tau
        self._correlation = RankCorrelation(config.window)
        self.trusted = True

    @property
    def tau(self) -> float | None:
        """Kendall's tau-b; None while there are too few pairs."""
        return self._correlation.tau

    def add(self, predicted: float, actual: float) -> None:
        """A task that was expected to take `predicted` tokens took `actual`."""
        self._correlation.add(predicted, actual)
        if self.tau is not None:
            self.trusted = self.tau >= self._min_tau + (0.0 if self.trusted else MARGIN)

    @property
    def reason(self) -> str:
        """Why they are trusted, or not."""
        groups = len(self._correlation)
        if self.tau is None:
            return f"too few groups to judge predicted lengths ({groups}): trusted"
        found = f"Kendall tau {self.tau:.2f} over {groups} groups"
        if self.trusted:
            return f"{found} is at least {self._min_tau:g}: predicted lengths are trusted"
        needed = "" if self.tau < self._min_tau else f" + {MARGIN:g}, needed to be trusted again"
        return f"{found} is below {self._min_tau:g}{needed}: first come, first served"
