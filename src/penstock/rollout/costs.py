"""What a step of the engine costs: sums of a linear least-squares fit, for calibrating the simulator.

    seconds = c0 + c1 * sequences decoded + c2 * tokens of their contexts + c3 * prompt tokens prefilled

Whoever has the sums solves the normal equations; differences of two readings fit what was in between.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

TERMS = ("n", "b", "c", "p", "y")
"""1, sequences decoded, tokens of their contexts, prompt tokens, seconds of compute."""
PRODUCTS = tuple(combinations_with_replacement(TERMS, 2))


class StepCosts:
    """Sums over all steps so far. Written by one thread; a reading is consistent in any."""

    def __init__(self) -> None:
        self._sums = (0.0,) * len(PRODUCTS)  # replaced as a whole, so that readers never see half a step

    def add(self, *, decoded: int, context: int, prefilled: int, seconds: float) -> None:
        """A step that advanced `decoded` sequences, which held `context` tokens, and computed `prefilled` prompt
        tokens."""
        if not decoded and not prefilled:
            return
        values = combinations_with_replacement((1.0, decoded, context, prefilled, seconds), 2)
        self._sums = tuple(total + one * other for total, (one, other) in zip(self._sums, values, strict=True))

    def counters(self) -> dict[str, float]:
        """Sums of products of `TERMS`, by the two names in their order."""
        return {f"cost_{one}{other}": total for (one, other), total in zip(PRODUCTS, self._sums, strict=True)}
