"""Who worked when: a Gantt chart of a few seconds, and the share of busy time over the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from penstock.observe.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, RED, SKY, STYLE, YELLOW

Record = dict[str, Any]
Floats = npt.NDArray[np.float64]

KINDS: dict[str, tuple[str, str, float]] = {
    "generate": ("generation", SKY, 0.72),
    "train": ("forward, backward", BLUE, 0.72),
    "step": ("optimizer step", ORANGE, 0.72),
    "publish": ("publish weights", YELLOW, 0.72),
    "update_weights": ("update weights", RED, 0.9),
    "checkpoint": ("checkpoint", INK, 0.72),
    "restore": ("restore", INK, 0.5),
    "warm_start": ("warm start", PURPLE, 0.72),
    "evaluate": ("evaluation", GREEN, 0.72),
}
"""Kind -> (name, colour, height of its bar), in the order they are drawn."""
WORK = {"generate", "train", "step", "warm_start"}
"""Model compute: what counts as busy."""
WINDOW_STEPS = 8
WINDOW_MIN_S, WINDOW_MAX_S = 1.0, 12.0
ABOVE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "columnspacing": 1.2, "handlelength": 1.4}
MAX_BINS = 150
MIN_BIN_S = 0.5


def draw(path: Path, metrics: Sequence[Record], spans: Sequence[Record]) -> Path:
    """Draw to `path`. Needs at least one span."""
    names = sorted({span["process"] for span in spans}, reverse=True)
    origin = min(span["start"] for span in spans)
    start, end = window(metrics, spans)
    with plt.rc_context(STYLE):
        figure, (gantt, busy) = plt.subplots(
            2, 1, figsize=(10, 3.4 + 0.55 * len(names)), height_ratios=[1 + 0.4 * len(names), 1.5]
        )
        kinds = _draw_gantt(gantt, [s for s in spans if s["end"] > start and s["start"] < end], names, start, end)
        gantt.set(
            title=f"{end - start:.1f} s of the run",
            xlabel=f"seconds, from {start - origin:.1f} s after the first work",
        )
        handles = [Patch(color=KINDS[kind][1], label=KINDS[kind][0]) for kind in KINDS if kind in kinds]
        gantt.legend(handles=handles, ncols=len(handles), fontsize=8, **ABOVE)
        _draw_busy(busy, spans, names, origin)
        busy.axvspan(start - origin, end - origin, color=GREY, alpha=0.4, linewidth=0, zorder=0)
        figure.savefig(path)
        plt.close(figure)
    return path


def window(metrics: Sequence[Record], spans: Sequence[Record]) -> tuple[float, float]:
    """A few seconds around the middle of training, about `WINDOW_STEPS` optimizer steps long; else the last seconds."""
    first = min(span["start"] for span in spans)
    last = max(span["end"] for span in spans)
    times = [line["time"] for line in metrics]
    if len(times) < 2:
        return max(first, last - WINDOW_MAX_S), max(last, first + 1e-3)
    per_step_s = (times[-1] - times[0]) / (len(times) - 1)
    width = float(np.clip(WINDOW_STEPS * per_step_s, WINDOW_MIN_S, WINDOW_MAX_S))
    middle = (times[0] + times[-1]) / 2
    return max(first, middle - width / 2), min(last, middle + width / 2)


def busy_shares(spans: Sequence[Record], edges: Floats) -> Floats:
    """The share of each bin between `edges` that some span covers; spans of one process do not overlap."""
    starts = np.asarray([span["start"] for span in spans], dtype=np.float64)
    ends = np.asarray([span["end"] for span in spans], dtype=np.float64)
    starts.sort()
    ends.sort()

    def covered_until(moments: Floats) -> Floats:
        """Seconds covered before each moment: what has ended, plus what is under way."""
        total: Floats = np.zeros(len(moments))
        for points, sign in ((starts, 1.0), (ends, -1.0)):
            sums = np.concatenate([[0.0], np.cumsum(points)])
            number = np.searchsorted(points, moments)
            total += sign * (number * moments - sums[number])
        return total

    shares: Floats = np.diff(covered_until(edges)) / np.diff(edges)
    return np.clip(shares, 0.0, 1.0)


def _draw_gantt(axes: Any, spans: Sequence[Record], names: Sequence[str], start: float, end: float) -> set[str]:
    smallest = (end - start) / 500  # narrower bars vanish between pixels
    for kind, (_, colour, height) in KINDS.items():
        for row, name in enumerate(names):
            bars = [
                (max(s["start"], start) - start, max(min(s["end"], end) - max(s["start"], start), smallest))
                for s in spans
                if s["kind"] == kind and s["process"] == name
            ]
            axes.broken_barh(bars, (row - height / 2, height), color=colour, linewidth=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(0, end - start)
    axes.grid(axis="y", visible=False)
    return {span["kind"] for span in spans}


def _draw_busy(axes: Any, spans: Sequence[Record], names: Sequence[str], origin: float) -> None:
    last = max(span["end"] for span in spans)
    num_bins = int(np.clip((last - origin) / MIN_BIN_S, 1, MAX_BINS))
    edges = np.linspace(origin, max(last, origin + 1e-3), num_bins + 1)
    colours = {"rollout": SKY, "trainer": BLUE}
    for name in sorted(names):
        working = [span for span in spans if span["process"] == name and span["kind"] in WORK]
        if working:
            colour = colours.get(name.split("-")[0], GREEN)
            axes.stairs(
                100 * busy_shares(working, edges),
                edges - origin,
                baseline=None,
                color=colour,
                linewidth=1.5,
                label=name,
            )
    axes.set(title="Busy with the model, whole run", xlabel="seconds after the first work", ylabel="% of the time")
    axes.set_ylim(0, 105)
    axes.set_xlim(0, edges[-1] - origin)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(ncols=8, fontsize=8, **ABOVE)
