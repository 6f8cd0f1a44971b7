"""Cost of an engine step: the sums for a linear least-squares fit, used to calibrate the simulator.

    seconds = c0 + c1 * sequences decoded + c2 * tokens of their contexts + c3 * prompt tokens prefilled

A reader of the sums solves the normal equations. The difference of two readings fits the steps between them.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

TERMS = ("n", "b", "c", "p", "y")
"""One, sequences decoded, tokens of their contexts, prompt tokens, seconds of compute."""
PRODUCTS = tuple(combinations_with_replacement(TERMS, 2))


class StepCosts:
    """Sums over all steps so far. One thread writes. A reading from any thread is consistent."""

    def __init__(self) -> None:
        self._sums = (0.0,) * len(PRODUCTS)  # replaced as a whole: readers never see half a step

    def add(self, *, decoded: int, context: int, prefilled: int, seconds: float) -> None:
        """Add a step that advanced `decoded` sequences, which held `context` tokens, and computed `prefilled` prompt
        tokens."""
        if not decoded and not prefilled:
            return
        values = combinations_with_replacement((1.0, decoded, context, prefilled, seconds), 2)
        self._sums = tuple(total + one * other for total, (one, other) in zip(self._sums, values, strict=True))

    def counters(self) -> dict[str, float]:
        """Return the sums of products of two `TERMS`. The key holds the two names, in the order of `TERMS`."""
        return {f"cost_{one}{other}": total for (one, other), total in zip(PRODUCTS, self._sums, strict=True)}
