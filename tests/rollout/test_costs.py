"""The sums hold what a least-squares fit needs."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.rollout.costs import StepCosts


def test_the_fit_finds_the_costs() -> None:
    costs = StepCosts()
    for decoded, prefilled in [(1, 0), (8, 0), (64, 0), (64, 100), (0, 30), (128, 7)]:
        costs.add(decoded, prefilled, 1e-3 + 2e-5 * decoded + 3e-6 * prefilled)
    costs.add(0, 0, 1.0)
    sums = {name.removeprefix("cost_"): value for name, value in costs.counters().items()}
    normal = [
        [sums["n"], sums["b"], sums["p"]],
        [sums["b"], sums["bb"], sums["bp"]],
        [sums["p"], sums["bp"], sums["pp"]],
    ]
    fitted = np.linalg.solve(normal, [sums["y"], sums["by"], sums["py"]])
    assert fitted == pytest.approx([1e-3, 2e-5, 3e-6]), "a step that did nothing tells nothing"
