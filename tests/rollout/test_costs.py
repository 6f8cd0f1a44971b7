"""The sums hold what a least-squares fit needs."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.rollout.costs import TERMS, StepCosts


def test_the_fit_finds_the_costs() -> None:
    costs = StepCosts()
    steps = [(1, 40, 0), (8, 90, 0), (64, 700, 0), (64, 9000, 100), (0, 0, 30), (128, 3000, 7)]
    for decoded, context, prefilled in steps:
        seconds = 1e-3 + 2e-5 * decoded + 4e-8 * context + 3e-6 * prefilled
        costs.add(decoded=decoded, context=context, prefilled=prefilled, seconds=seconds)
    costs.add(decoded=0, context=0, prefilled=0, seconds=1.0)
    sums = {name.removeprefix("cost_"): value for name, value in costs.counters().items()}
    sums |= {name[::-1]: value for name, value in sums.items()}
    *terms, seconds = TERMS  # type: ignore[assignment]
    fitted = np.linalg.solve(
        [[sums[one + other] for other in terms] for one in terms], [sums[term + "y"] for term in terms]
    )
    assert fitted == pytest.approx([1e-3, 2e-5, 4e-8, 3e-6]), "a step that did nothing tells nothing"
