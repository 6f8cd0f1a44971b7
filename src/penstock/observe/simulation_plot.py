"""The picture of a simulation: how fast each strategy is against what its machines allow, and where time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from penstock.observe.style import BLUE, GREY, INK, ORANGE, PURPLE, SKY, STYLE

Record = dict[str, Any]


def draw(path: Path, results: Sequence[Record]) -> Path:
    """Draw to `path`. A result has a `name`, and numbers under `mean` and `spread`."""
    names = [result["name"] for result in results]
    places = np.arange(len(names))[::-1]
    with plt.rc_context(STYLE):
        figure, (speed, losses) = plt.subplots(
            1, 2, figsize=(11, 1.4 + 0.42 * len(names)), sharey=True, width_ratios=(3, 2)
        )
        _draw_speed(speed, places, results)
        _draw_losses(losses, places, results)
        speed.set_yticks(places, names)
        speed.grid(False, axis="y")
        losses.grid(False, axis="y")
        figure.savefig(path)
        plt.close(figure)
    return path


def _draw_speed(axes: Any, places: Any, results: Sequence[Record]) -> None:
    speeds, limits = _numbers(results, "samples_per_s"), _numbers(results, "limit_samples_per_s")
    errors = [result["spread"].get("samples_per_s") or 0.0 for result in results]
    axes.barh(places, limits, height=0.62, color=GREY, alpha=0.5, label="what the machines allow (X*)")
    axes.barh(places, speeds, height=0.62, color=BLUE, xerr=errors if any(errors) else None, label="achieved")
    for place, speed, limit in zip(places, speeds, limits, strict=True):
        axes.annotate(
            f"{speed:,.4g}/s, {speed / limit:.0%}",
            (max(speed, limit), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )
    axes.set(xlabel="samples trained per second", title="Throughput")
    axes.margins(x=0.28)
    axes.set_xlim(left=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)


def _draw_losses(axes: Any, places: Any, results: Sequence[Record]) -> None:
    kinds = ("discarded", "filtered", "restarted", "surplus", "masked")
    wasted = np.sum([_numbers(results, f"wasted_{kind}") for kind in kinds], axis=0)
    rows = (
        (_numbers(results, "generator_bubble"), SKY, "generator bubble"),
        (_numbers(results, "trainer_idle"), ORANGE, "trainer idle"),
        (wasted, PURPLE, "tokens wasted"),
    )
    for number, (shares, color, label) in enumerate(rows):
        axes.barh(places + 0.22 * (1 - number), shares, height=0.2, color=color, label=label)
    axes.set(xlabel="share", title="Losses", xlim=(0, 1))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def _numbers(results: Sequence[Record], key: str) -> list[float]:
    return [result["mean"].get(key) or 0.0 for result in results]
