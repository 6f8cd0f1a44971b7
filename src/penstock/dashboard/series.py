"""Curves of a run for a screen: without the steps that were lost, and in at most as many points as there are pixels.

Pure functions on columns of numbers; one value per line of metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]

RATE = "rate:"
"""Before the name of a total: its growth per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One series in buckets. NaN where a bucket has no number."""

    mean: Floats
    min: Floats
    max: Floats


def surviving(step: Floats) -> Mask:
    """Return which lines count. A step that is taken again after a rewind replaces its first line and all lines after
    that, so a line counts if every later line has a higher step: `observe.summary.surviving` on a column."""
    if not len(step):
        return np.zeros(0, dtype=bool)
    lowest_after = np.minimum.accumulate(step[::-1])[::-1]
    counts = np.ones(len(step), dtype=bool)
    counts[:-1] = step[:-1] < lowest_after[1:]
    return counts


def step_at(columns: Mapping[str, Floats], time: float) -> int:
    """Return the latest step that counts and had ended at a time (seconds since the epoch); 0 before the first one.
    `columns`: `step` and `time`."""
    steps = columns["step"][surviving(columns["step"]) & (columns["time"] <= time)]
    return int(steps[-1]) if len(steps) else 0


def rate(total: Floats, time: Floats) -> Floats:
    """Return the growth of a total per second since the line before. NaN for the first line, and where no time has
    passed or the total has become smaller."""
    with np.errstate(divide="ignore", invalid="ignore"):
        grown = np.diff(total, prepend=np.nan) / np.diff(time, prepend=np.nan)
    return np.where(np.isfinite(grown) & (grown >= 0), grown, np.nan)


def starts(num_rows: int, points: int) -> Places:
    """Return where each of at most `points` buckets begins. Their sizes differ by at most one line."""
    num_buckets = min(num_rows, max(points, 1))
    return np.arange(num_buckets) * num_rows // max(num_buckets, 1)


def bucketed(values: Floats, begins: Places, weights: Floats | None = None) -> Curve:
    """Return the mean, lowest and highest value of each bucket, without NaN. With `weights`, the mean is weighted."""
    if not len(begins):
        empty = np.zeros(0)
        return Curve(mean=empty, min=empty, max=empty)
    known = np.isfinite(values)
    weight = known.astype(np.float64) if weights is None else np.where(known & np.isfinite(weights), weights, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = np.add.reduceat(np.where(known, values, 0.0) * weight, begins)
        mean = sums / np.add.reduceat(weight, begins)
    low = np.minimum.reduceat(np.where(known, values, np.inf), begins)
    high = np.maximum.reduceat(np.where(known, values, -np.inf), begins)
    mean = np.clip(mean, low, high)  # rounding must not lead out of the range
    return Curve(
        mean=np.where(np.isfinite(mean), mean, np.nan),
        min=np.where(np.isfinite(low), low, np.nan),
        max=np.where(np.isfinite(high), high, np.nan),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Several series over the same buckets."""

    x: Floats
    """The value of x in the last line of each bucket."""
    times: Floats
    """Seconds since the epoch, of the same lines."""
    curves: Mapping[str, Curve]
    num_steps: int
    """Number of lines that count, in the whole run."""


def needed(names: list[str], x: str) -> list[str]:
    """Return the columns that the series `names` over `x` are made of."""
    return list(dict.fromkeys(["step", "time", x, *(name.removeprefix(RATE) for name in names)]))


def curves(
    columns: Mapping[str, Floats],
    names: list[str],
    *,
    x: str,
    points: int,
    begin: float | None = None,
    end: float | None = None,
) -> Curves:
    """Return series in at most `points` buckets, of the lines with `begin` <= x <= `end`. `columns` are those that
    `needed` names."""
    counts = surviving(columns["step"])
    kept = {name: column[counts] for name, column in columns.items()}
    rates = {name: rate(kept[name.removeprefix(RATE)], kept["time"]) for name in names if name.startswith(RATE)}
    seconds = np.diff(kept["time"], prepend=np.nan)
    place = kept[x]
    shown = np.isfinite(place)
    if begin is not None:
        shown &= place >= begin
    if end is not None:
        shown &= place <= end
    begins = starts(int(shown.sum()), points)
    found = {
        name: bucketed(rates[name][shown], begins, seconds[shown])
        if name in rates
        else bucketed(kept[name][shown], begins)
        for name in names
    }
    lasts = np.append(begins[1:], shown.sum())[: len(begins)].astype(np.intp) - 1
    return Curves(x=place[shown][lasts], times=kept["time"][shown][lasts], curves=found, num_steps=int(counts.sum()))
