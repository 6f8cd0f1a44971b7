"""Reward over optimizer steps: every step, its running mean, and the held-out evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from penstock.observe.style import BLUE, GREY, INK, ORANGE, STYLE

Record = dict[str, Any]
Floats = npt.NDArray[np.float64]


LINE_STYLES = ("--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
"""Of tags."""


def draw(path: Path, metrics: Sequence[Record], events: Sequence[Record]) -> Path:
    """Draw to `path`. Needs at least one step with a reward."""
    points = [(line["step"], line["reward"]) for line in metrics if line.get("reward") is not None]
    steps, rewards = (np.asarray(column, dtype=np.float64) for column in zip(*points, strict=True))
    evaluations = {
        event["when"]: event
        for event in events
        if event.get("event") == "evaluation" and event.get("reward") is not None
    }
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.5))
        size = float(np.clip(3000 / len(steps), 5, 26))
        axes.scatter(steps, rewards, s=size, color=BLUE, alpha=0.4, linewidths=0, label="training, each step")
        if len(steps) > 1:
            axes.plot(steps, smooth(rewards), color=BLUE, linewidth=2, label="training, smoothed")
        _draw_tags(axes, metrics)
        _mark_evaluations(axes, evaluations, float(steps[-1]))
        axes.set(xlabel="optimizer step", ylabel="mean reward", title="Reward")
        axes.margins(x=0.03, y=0.1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower right")
        figure.savefig(path)
        plt.close(figure)
    return path


def smooth(values: Floats) -> Floats:
    """Centred running mean over about a twentieth of the run; at the ends over what there is."""
    width = max(1, len(values) // 20) | 1
    kernel = np.ones(width)
    total: Floats = np.convolve(values, kernel, mode="same")
    return total / np.convolve(np.ones(len(values)), kernel, mode="same")


def _draw_tags(axes: Any, metrics: Sequence[Record]) -> None:
    """A mixture's tags, each smoothed."""
    tags = sorted({key for line in metrics for key in line if key.startswith("reward/") and line[key] is not None})
    for place, key in enumerate(tags if len(tags) > 1 else ()):
        points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        steps, rewards = (np.asarray(column, dtype=np.float64) for column in zip(*points, strict=True))
        style = LINE_STYLES[place % len(LINE_STYLES)]
        label = key.removeprefix("reward/")
        axes.plot(steps, smooth(rewards), color=BLUE, linewidth=1, linestyle=style, alpha=0.8, label=label)


def _mark_evaluations(axes: Any, evaluations: dict[str, Record], last_step: float) -> None:
    """Before, after and every so many steps; the first and the last with their values."""
    places = {"before": 0.0, "after": last_step}
    known = sorted(
        (places[when] if when in places else float(event["step"]), event["reward"], when)
        for when, event in evaluations.items()
    )
    if not known:
        return
    for _, reward, when in known:
        if when in places:
            axes.axhline(reward, color=ORANGE, linewidth=1, linestyle=":", alpha=0.7, zorder=1)
    xs, ys = [x for x, _, _ in known], [y for _, y, _ in known]
    axes.plot(xs, ys, color=ORANGE, linewidth=len(known) > 2, alpha=0.7, zorder=4)
    axes.scatter(xs, ys, s=70, color=ORANGE, zorder=5, label="held-out tasks")
    for x, reward, when in (point for point in known if point[2] in places):
        axes.annotate(
            f"{when} {reward:.2f}",
            (x, reward),
            xytext=(8 if when == "before" else -8, 9),
            textcoords="offset points",
            ha="left" if when == "before" else "right",
            color=INK,
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": GREY, "linewidth": 0.5},
            zorder=6,
        )
