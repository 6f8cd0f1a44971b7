"""Down-sampling and rewinds, for any run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dashboard.series import bucketed, curves, rate, starts, step_at, surviving
from penstock.observe import summary

steps = st.lists(st.integers(0, 30), max_size=60)
values = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=200)


@given(steps)
def test_the_lines_that_count_are_those_of_the_summary(taken: list[int]) -> None:
    lines = [{"step": step, "line": number} for number, step in enumerate(taken)]
    expected = [line["line"] for line in summary.surviving(lines)]
    assert np.flatnonzero(surviving(np.array(taken, dtype=float))).tolist() == expected


@given(values, st.integers(1, 300))
def test_buckets_keep_extremes_and_the_mean_of_all(numbers: list[float], points: int) -> None:
    column = np.array(numbers)
    begins = starts(len(column), points)
    curve = bucketed(column, begins)
    assert len(curve.mean) == min(len(column), points)
    known = column[np.isfinite(column)]
    if not len(known):
        assert np.isnan(curve.mean).all()
        return
    assert np.nanmin(curve.min) == known.min() and np.nanmax(curve.max) == known.max()
    has_some = np.isfinite(curve.mean)
    assert (curve.min[has_some] <= curve.mean[has_some]).all() and (curve.mean[has_some] <= curve.max[has_some]).all()
    counts = np.add.reduceat(np.isfinite(column).astype(float), begins)
    assert np.nansum(curve.mean * counts) == pytest.approx(known.sum(), rel=1e-6, abs=1e-3)
    sizes = np.diff([*begins, len(column)])
    assert sizes.min() >= 1 and sizes.max() - sizes.min() <= 1


@given(steps, st.integers(1, 40), st.integers(0, 30), st.integers(0, 30))
def test_curves_have_rising_steps_within_the_window(taken: list[int], points: int, begin: int, end: int) -> None:
    column = np.array(taken, dtype=float)
    columns = {"step": column, "time": np.arange(len(taken), dtype=float), "a": column * 2}
    found = curves(columns, ["a"], x="step", points=points, begin=begin, end=end)
    assert (np.diff(found.x) > 0).all() and len(found.x) <= points
    assert ((found.x >= begin) & (found.x <= end)).all()
    kept = [line["step"] for line in summary.surviving([{"step": step} for step in taken])]
    in_window = [step for step in kept if begin <= step <= end]
    assert found.num_steps == len(kept)
    assert (not in_window and not len(found.x)) or found.x[-1] == in_window[-1]
    assert not in_window or np.max(found.curves["a"].max) == 2 * max(in_window)


def test_the_step_at_a_time_leaves_out_lost_steps() -> None:
    columns = {"step": np.array([1.0, 2.0, 3.0, 2.0, 3.0]), "time": np.array([10.0, 20.0, 30.0, 40.0, 50.0])}
    assert [step_at(columns, time) for time in (9, 10, 35, 40, 99)] == [0, 1, 1, 2, 3]
    assert step_at({"step": np.zeros(0), "time": np.zeros(0)}, 9.0) == 0


def test_rates_are_weighted_by_time_and_never_negative() -> None:
    time = np.array([0.0, 1.0, 3.0, 3.0, 4.0])
    total = np.array([0.0, 10.0, 14.0, 20.0, 5.0])
    per_second = rate(total, time)
    assert per_second[1:3].tolist() == [10.0, 2.0] and np.isnan(per_second[[0, 3, 4]]).all()
    columns = {"step": np.arange(5.0), "time": time, "total": total}
    found = curves(columns, ["rate:total"], x="step", points=1)
    assert found.curves["rate:total"].mean.tolist() == [pytest.approx(14 / 3)]
