"""What a simulation predicts of a run, as the small document `prediction.json` of a run directory. The dashboard shows
it beside what the run measures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from penstock.simulator.measures import Measures

NEEDED = (
    *("step_s", "samples_per_s", "trainer_idle", "generator_idle", "length_mean", "length_mean_ratio"),
    *("limit_samples_per_s", "limit_generation", "limit_training", "efficiency"),
)
"""Figures of a simulated run that a prediction is made of."""


def forecast(runs: Sequence[Measures], *, by: str, about: str, shares_devices: bool) -> dict[str, Any]:
    """Return the prediction from simulated runs that differ in their seed. `by`: the command that made it. `about`: the
    strategy, and the split of the devices.

    Busy shares are shares of the whole time, also where generation and training take turns. `bound` has X*, the most
    that the modelled machines allow.
    """
    mean = {name: fmean(getattr(run, name) for run in runs) for name in NEEDED}
    ages = [run.token_staleness_mean for run in runs if run.token_staleness_mean is not None]
    left = mean["trainer_idle"] if shares_devices else 1.0
    trained_tokens = mean["length_mean"] * mean["length_mean_ratio"]
    return {
        "time": time.time(),
        "by": by,
        "about": about,
        "figures": {
            "step_s": mean["step_s"],
            "samples_per_s": mean["samples_per_s"],
            "trainer_busy": 1 - mean["trainer_idle"],
            "servers_busy": (1 - mean["generator_idle"]) * left,
            "staleness_mean": fmean(ages) if ages else None,
            "response_tokens": mean["length_mean"],
        },
        "bound": {
            "samples_per_s": mean["limit_samples_per_s"],
            "generation": mean["limit_generation"],
            "training": mean["limit_training"],
            "tokens_per_s": mean["limit_samples_per_s"] * trained_tokens,
            "share": mean["efficiency"],
        },
    }
