"""What a step of the engine costs: sums of a linear least-squares fit, for calibrating the simulator.

    seconds = c0 + c1 * sequences decoded + c2 * prompt tokens prefilled

Whoever has the sums solves the 3x3 normal equations; differences of two readings fit what was in between.
"""

from __future__ import annotations


class StepCosts:
    """Sums over all steps so far. Written by one thread; a reading is consistent in any."""

    def __init__(self) -> None:
        self._sums = (0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)  # replaced as a whole, so that readers never see half a step

    def add(self, decoded: int, prefilled: int, seconds: float) -> None:
        """A step that advanced `decoded` sequences and computed `prefilled` prompt tokens."""
        if not decoded and not prefilled:
            return
        n, b, p, bb, bp, pp, y, by, py = self._sums
        self._sums = (
            n + 1,
            b + decoded,
            p + prefilled,
            bb + decoded * decoded,
            bp + decoded * prefilled,
            pp + prefilled * prefilled,
            y + seconds,
            by + decoded * seconds,
            py + prefilled * seconds,
        )

    def counters(self) -> dict[str, float]:
        """n: steps; b: sequences decoded; p: prompt tokens; y: seconds of compute; pairs: sums of products."""
        names = ("n", "b", "p", "bb", "bp", "pp", "y", "by", "py")
        return {f"cost_{name}": float(value) for name, value in zip(names, self._sums, strict=True)}
