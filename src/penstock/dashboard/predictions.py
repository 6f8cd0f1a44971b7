"""What a simulation predicted of a run, beside what the run has measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.dashboard.metrics_index import MetricsIndex
from penstock.dashboard.series import surviving
from penstock.observe import jsonl
from penstock.observe.summary import PREDICTION

Floats = npt.NDArray[np.float64]
Figures = dict[str, float | None]

COLUMNS = (
    *("step", "time", "wall_s", "ledger/trained", "trainer_busy_s", "num_trainers", "generator_busy_s", "num_servers"),
    *("staleness_mean", "response_length_mean"),
)
FIGURES = ("step_s", "samples_per_s", "trainer_busy", "servers_busy", "staleness_mean", "response_tokens")
"""Figures that are predicted and measured. Both leave out the first steps."""
BOUND = ("samples_per_s", "generation", "training", "tokens_per_s", "share")
"""Figures of X*, the most that the modelled machines allow."""
FEWEST_STEPS = 4
MOST_NEEDS = 64
"""Processes of a memory plan."""


def prediction_of(run_dir: Path) -> dict[str, Any] | None:
    """Return the prediction that a run keeps; None without one."""
    found = jsonl.read_json(run_dir / PREDICTION)
    if not found:
        return None
    return {
        "time": _number(found.get("time")),
        **{name: value if isinstance(value := found.get(name), str) else None for name in ("by", "about")},
        "figures": _numbers(found.get("figures"), FIGURES),
        "bound": _numbers(found.get("bound"), BOUND),
        "memory": _memory(found.get("memory")),
    }


def measured(metrics: MetricsIndex) -> Figures | None:
    """Return the figures of a run after the first tenth of its steps; None before it has taken a few."""
    columns = metrics.columns(COLUMNS)
    kept = surviving(columns["step"])
    columns = {name: column[kept] for name, column in columns.items()}
    num_steps = len(columns["step"])
    if num_steps < FEWEST_STEPS:
        return None
    first = max(num_steps // 10, 1) - 1
    lasted_s, worked_s = (_growth(columns[name], first) for name in ("time", "wall_s"))
    steps = columns["step"][-1] - columns["step"][first]
    return {
        "step_s": _ratio(lasted_s, steps),
        "samples_per_s": _ratio(_growth(columns["ledger/trained"], first), lasted_s),
        "trainer_busy": _ratio(_growth(columns["trainer_busy_s"], first), worked_s * columns["num_trainers"][-1]),
        "servers_busy": _ratio(_growth(columns["generator_busy_s"], first), worked_s * columns["num_servers"][-1]),
        "staleness_mean": _mean(columns["staleness_mean"][first + 1 :]),
        "response_tokens": _mean(columns["response_length_mean"][first + 1 :]),
    }


def _growth(total: Floats, first: int) -> float:
    return float(total[-1] - total[first])


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if math.isfinite(part) and math.isfinite(whole) and whole > 0 and part >= 0 else None


def _mean(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _number(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


def _numbers(found: object, names: tuple[str, ...]) -> Figures:
    known = found if isinstance(found, Mapping) else {}
    return {name: _number(known.get(name)) for name in names}


def _memory(found: object) -> list[dict[str, Any]]:
    """Return the bytes that were counted for each process, with its name and number."""
    needs = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    return [
        {"who": str(each.get("who")), "count": _number(each.get("count")), "bytes": _number(each.get("total"))}
        for each in needs[:MOST_NEEDS]
    ]
