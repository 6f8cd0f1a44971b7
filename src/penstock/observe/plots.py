"""The pictures: reward and process activity of a run, and the comparison of simulated strategies.

The pictures of a run are drawn from its files, even if the run was short or failed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config.imports import MATPLOTLIB, away_from_foreign
from penstock.observe import jsonl
from penstock.observe.summary import read_steps

with away_from_foreign(MATPLOTLIB):
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

Record = dict[str, Any]
Floats = npt.NDArray[np.float64]

INK, GREY, PALE = "#222831", "#c9ced6", "#f3f4f6"
BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#e07b00", "#009e73", "#aa5fa0"
SKY, YELLOW, RED = "#56b4e9", "#f0c808", "#c1123f"
"""One palette, colour-blind safe (after Okabe and Ito)."""
STYLE: dict[str, Any] = {
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("figure.constrained_layout.use", "axes.grid", "axes.axisbelow"), True),
    "axes.edgecolor": GREY,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "figure.dpi": 130,
    "font.size": 10,
    "grid.color": PALE,
    "legend.fontsize": 9,
}
TAG_LINES = ("--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)))
"""Line styles of the tags of a mixture."""
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
"""Kind of span -> (name, colour, height of its bar), in the order they are drawn."""
WORK = {"generate", "train", "step", "warm_start"}
"""Kinds of model compute, which count as busy."""
LENGTHS = {
    "response_length_mean": ("played, mean of a step", SKY),
    "length_p50_trained": ("trained, median", BLUE),
    "length_p90_trained": ("trained, 90th percentile", PURPLE),
    "length_p50_admitted": ("of the data, median", GREY),
}
STALENESS = {"staleness_mean": ("mean", BLUE), "staleness_max": ("largest", GREY)}
"""Metric -> (label, colour)."""
WINDOW_STEPS = 8
WINDOW_MIN_S, WINDOW_MAX_S = 1.0, 12.0
ABOVE: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "columnspacing": 1.2, "handlelength": 1.4}
BELOW: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
MAX_BINS = 150
MIN_BIN_S = 0.5


def draw(run_dir: Path) -> list[Path]:
    """Draw the pictures that the run's files have data for; return the pictures written."""
    metrics = read_steps(run_dir)
    spans = [line for line in jsonl.read(run_dir / "timeline.jsonl") if "start" in line and "end" in line]
    trained = [line for line in metrics if "trainer_busy_s" in line]
    reward, timeline, adaptation = (run_dir / "plots" / f"{name}.png" for name in ("reward", "timeline", "adaptation"))
    drawn: list[Path] = []
    if any(line.get("reward") is not None for line in trained):
        draw_reward(reward, trained, jsonl.read(run_dir / "events.jsonl"))
        drawn.append(reward)
    if spans:
        draw_timeline(timeline, metrics, spans)
        drawn.append(timeline)
    decisions = jsonl.read(run_dir / "timeline.jsonl")
    if len({line.get("trigger_min_samples") for line in trained}) > 1 or (tuned(decisions) and len(trained) > 1):
        draw_adaptation(adaptation, trained, decisions)
        drawn.append(adaptation)
    return drawn


@contextmanager
def _picture(path: Path, *axes: int, width: float, height: float, **layout: Any) -> Iterator[Any]:
    """Yield the axes of a picture that is written to `path` after the body."""
    path.parent.mkdir(exist_ok=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height))
        yield figure.subplots(*axes, **layout)
        figure.savefig(path)


def _series(metrics: Sequence[Record], key: str) -> tuple[Floats, Floats]:
    """Return the steps that have a value of `key`, and the values. Needs at least one."""
    points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
    numbers, values = np.asarray(points, dtype=np.float64).T
    return numbers, values


def draw_reward(path: Path, metrics: Sequence[Record], events: Sequence[Record]) -> None:
    """Draw the reward of every step, its running mean, and the held-out evaluations. Needs at least one step with a
    reward."""
    numbers, rewards = _series(metrics, "reward")
    with _picture(path, width=8, height=4.5) as axes:
        size = float(np.clip(3000 / len(numbers), 5, 26))
        axes.scatter(numbers, rewards, s=size, color=BLUE, alpha=0.4, linewidths=0, label="training, each step")
        if len(numbers) > 1:
            axes.plot(numbers, smooth(rewards), color=BLUE, linewidth=2, label="training, smoothed")
        _draw_tags(axes, metrics)
        _mark_evaluations(axes, events, numbers[-1])
        axes.set(xlabel="optimizer step", ylabel="mean reward", title="Reward")
        axes.margins(x=0.03, y=0.1)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="lower right")


def smooth(values: Floats) -> Floats:
    """Return the centred running mean over about a twentieth of the run; at the ends over the values that exist."""
    kernel = np.ones(max(1, len(values) // 20) | 1)
    total: Floats = np.convolve(values, kernel, mode="same")
    return total / np.convolve(np.ones(len(values)), kernel, mode="same")


def _draw_tags(axes: Any, metrics: Sequence[Record]) -> None:
    """Draw the smoothed rewards of a mixture's tags."""
    tags = sorted({key for line in metrics for key in line if key.startswith("reward/") and line[key] is not None})
    for place, key in enumerate(tags if len(tags) > 1 else ()):
        numbers, rewards = _series(metrics, key)
        style = {"color": BLUE, "linewidth": 1, "linestyle": TAG_LINES[place % len(TAG_LINES)], "alpha": 0.8}
        axes.plot(numbers, smooth(rewards), label=key.removeprefix("reward/"), **style)


def _mark_evaluations(axes: Any, events: Sequence[Record], last_step: float) -> None:
    """Mark the latest evaluations before, during and after training; label the first and the last with their values."""
    steps_of = {"before": 0.0, "after": last_step}
    latest = {event["when"]: event for event in events if event.get("event") == "evaluation"}
    known = sorted(
        (steps_of.get(when, e["step"]), e["reward"], when) for when, e in latest.items() if e.get("reward") is not None
    )
    if not known:
        return
    xs, ys, _ = zip(*known, strict=True)
    axes.plot(xs, ys, color=ORANGE, linewidth=len(known) > 2, alpha=0.7, zorder=4)
    axes.scatter(xs, ys, s=70, color=ORANGE, zorder=5, label="held-out tasks")
    frame = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": GREY, "linewidth": 0.5}
    for x, reward, when in (point for point in known if point[2] in steps_of):
        axes.axhline(reward, color=ORANGE, linewidth=1, linestyle=":", alpha=0.7, zorder=1)
        offset, side = (8, "left") if when == "before" else (-8, "right")
        place = {"xytext": (offset, 9), "textcoords": "offset points", "ha": side, "zorder": 6}
        axes.annotate(f"{when} {reward:.2f}", (x, reward), color=INK, fontsize=9, bbox=frame, **place)


def draw_timeline(path: Path, metrics: Sequence[Record], spans: Sequence[Record]) -> None:
    """Draw the activity of the processes: a Gantt chart of a few seconds, and the share of busy time over the whole
    run. Needs at least one span."""
    names = sorted({span["process"] for span in spans}, reverse=True)
    origin = min(span["start"] for span in spans)
    start, end = window(metrics, spans)
    size = {"width": 10, "height": 3.4 + 0.55 * len(names)}
    with _picture(path, 2, 1, **size, height_ratios=[1 + 0.4 * len(names), 1.5]) as (gantt, busy):
        _draw_gantt(gantt, [s for s in spans if s["end"] > start and s["start"] < end], names, start, end)
        gantt.set_xlabel(f"seconds, from {start - origin:.1f} s after the first work")
        _draw_busy(busy, spans, names, origin)
        busy.axvspan(start - origin, end - origin, color=GREY, alpha=0.4, linewidth=0, zorder=0)


def window(metrics: Sequence[Record], spans: Sequence[Record]) -> tuple[float, float]:
    """Return the window of the Gantt chart: about `WINDOW_STEPS` optimizer steps around the middle of training. Without
    at least two steps, it is the last seconds."""
    first, last = min(span["start"] for span in spans), max(span["end"] for span in spans)
    times = [line["time"] for line in metrics]
    if len(times) < 2:
        return max(first, last - WINDOW_MAX_S), max(last, first + 1e-3)
    per_step_s = (times[-1] - times[0]) / (len(times) - 1)
    half = float(np.clip(WINDOW_STEPS * per_step_s, WINDOW_MIN_S, WINDOW_MAX_S)) / 2
    middle = (times[0] + times[-1]) / 2
    return max(first, middle - half), min(last, middle + half)


def _draw_gantt(axes: Any, spans: Sequence[Record], names: Sequence[str], start: float, end: float) -> None:
    smallest = (end - start) / 500  # narrower bars would be invisible
    for kind, (_, colour, height) in KINDS.items():
        for row, name in enumerate(names):
            bars = [
                (max(s["start"], start) - start, max(min(s["end"], end) - max(s["start"], start), smallest))
                for s in spans
                if s["kind"] == kind and s["process"] == name
            ]
            axes.broken_barh(bars, (row - height / 2, height), color=colour, linewidth=0)
    axes.set(title=f"{end - start:.1f} s of the run", xlim=(0, end - start), ylim=(-0.6, len(names) - 0.4))
    axes.set_yticks(range(len(names)), names)
    axes.grid(axis="y", visible=False)
    shown = {span["kind"] for span in spans}
    handles = [Patch(color=colour, label=label) for kind, (label, colour, _) in KINDS.items() if kind in shown]
    axes.legend(handles=handles, ncols=len(handles), fontsize=8, **ABOVE)


def busy_shares(spans: Sequence[Record], edges: Floats) -> Floats:
    """Return the share of each bin between `edges` that spans cover; spans of one process do not overlap."""
    starts, ends = (np.asarray([span[key] for span in spans], dtype=np.float64) for key in ("start", "end"))
    covered_s = [(np.clip(edge, starts, ends) - starts).sum() for edge in edges]
    shares: Floats = np.clip(np.diff(covered_s) / np.diff(edges), 0.0, 1.0)
    return shares


def _draw_busy(axes: Any, spans: Sequence[Record], names: Sequence[str], origin: float) -> None:
    last = max(span["end"] for span in spans)
    num_bins = int(np.clip((last - origin) / MIN_BIN_S, 1, MAX_BINS))
    edges = np.linspace(origin, max(last, origin + 1e-3), num_bins + 1)
    colours = {"rollout": SKY, "trainer": BLUE}
    for name in sorted(names):
        if working := [span for span in spans if span["process"] == name and span["kind"] in WORK]:
            style = {"color": colours.get(name.split("-")[0], GREEN), "linewidth": 1.5, "baseline": None}
            axes.stairs(100 * busy_shares(working, edges), edges - origin, label=name, **style)
    axes.set(title="Busy with the model, whole run", xlabel="seconds after the first work", ylabel="% of the time")
    axes.set(xlim=(0, edges[-1] - origin), ylim=(0, 105))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(ncols=8, fontsize=8, **ABOVE)


def draw_adaptation(path: Path, metrics: Sequence[Record], timeline: Sequence[Record]) -> None:
    """Draw how the scheduler's settings followed the run: entropy and its levels, N_min and T_max, the lengths that
    were played and trained, and staleness. A vertical line marks each setting that tuning has changed. Needs at least
    two steps."""
    with _picture(path, 4, 1, width=9, height=10.5, sharex=True) as (entropy, thresholds, lengths, staleness):
        _draw_entropy(entropy, metrics, timeline)
        _draw_thresholds(thresholds, metrics)
        _draw_lines(lengths, metrics, LENGTHS)
        lengths.set(ylabel="tokens", title="Lengths of answers")
        _draw_lines(staleness, metrics, STALENESS)
        staleness.set(xlabel="optimizer step", ylabel="versions", title="Staleness of trained tokens")
        for axes in (entropy, lengths, staleness):
            axes.set_ylim(bottom=0)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(ncols=4, fontsize=8, **ABOVE)
        for step, label in tuned(timeline):
            for axes in (entropy, thresholds, lengths, staleness):
                axes.axvline(step, color=GREY, linewidth=1, linestyle="-.")
            staleness.annotate(
                label, (step, 0.97), xycoords=("data", "axes fraction"), rotation=90, fontsize=7, ha="right", va="top"
            )
        staleness.xaxis.set_major_locator(MaxNLocator(integer=True))


def tuned(timeline: Sequence[Record]) -> list[tuple[int, str]]:
    """Return the changes of settings that tuning made: (policy version, what changed)."""

    def told(name: str, value: object) -> str:
        return f"{name.split('.')[-1]} {'unset' if value is None else value}"

    changes = [line for line in timeline if line.get("decider") == "tuning" and "adapted" in line]
    return [
        (line["policy_version"], "\n".join(told(name, pair[1]) for name, pair in line["adapted"].items()))
        for line in changes
    ]


def _draw_lines(axes: Any, metrics: Sequence[Record], lines: dict[str, tuple[str, str]]) -> None:
    for key, (label, colour) in lines.items():
        if any(line.get(key) is not None for line in metrics):
            axes.plot(*_series(metrics, key), color=colour, linewidth=1.2, label=label)


def _draw_entropy(axes: Any, metrics: Sequence[Record], timeline: Sequence[Record]) -> None:
    """Entropy, its reference, and the thresholds of its levels where the feedback uses them."""
    numbers, values = _series(metrics, "entropy")
    axes.plot(numbers, values, color=BLUE, linewidth=0.8, alpha=0.5, label="each step")
    axes.plot(numbers, smooth(values), color=BLUE, linewidth=2, label="smoothed")
    known = [line for line in timeline if line.get("decider") == "feedback" and "reference" in line]
    if known:
        axes.axhline(known[-1]["reference"], color=GREY, linewidth=1, linestyle="--", label="reference")
    for name, colour in (("normal_below", ORANGE), ("low_below", RED)):
        if known and name in known[-1]:
            level, label = known[-1]["reference"] * known[-1][name], name.replace("_", " ")
            axes.axhline(level, color=colour, linewidth=1, linestyle=":", label=label)
    axes.set(ylabel="nats per token", title="Entropy of the policy")


def _draw_thresholds(axes: Any, metrics: Sequence[Record]) -> None:
    """N_min on the left axis, T_max on the right one."""
    numbers, samples = _series(metrics, "trigger_min_samples")
    left = axes.step(numbers, samples, where="post", color=BLUE, linewidth=1.8, label="N_min")
    axes.set(ylabel="samples", title="Trigger")
    axes.set_ylim(bottom=0)
    handles = [*left]
    if any(line.get("trigger_max_wait_s") is not None for line in metrics):
        beside = axes.twinx()
        beside.grid(visible=False)
        waits = _series(metrics, "trigger_max_wait_s")
        handles += beside.step(*waits, where="post", color=ORANGE, linewidth=1.2, linestyle="--", label="T_max")
        beside.set_ylabel("seconds")
        beside.set_ylim(bottom=0)
    axes.legend(handles=handles, ncols=2, fontsize=8, **ABOVE)


def draw_simulation(path: Path, results: Sequence[Record]) -> None:
    """Draw the speed of each strategy beside the limit of its machines, and its losses. A result has a `name`, and
    numbers under `mean` and `spread`."""
    names = [result["name"] for result in results]
    rows = np.arange(len(names))[::-1]
    size = {"width": 11, "height": 1.4 + 0.42 * len(names)}
    with _picture(path, 1, 2, **size, sharey=True, width_ratios=(3, 2)) as (speed, losses):
        _draw_speed(speed, rows, results)
        _draw_losses(losses, rows, results)
        speed.set_yticks(rows, names)
        for axes in (speed, losses):
            axes.grid(False, axis="y")


def _draw_speed(axes: Any, rows: Any, results: Sequence[Record]) -> None:
    speeds, limits = _means(results, "samples_per_s"), _means(results, "limit_samples_per_s")
    errors = [result["spread"].get("samples_per_s") or 0.0 for result in results]
    axes.barh(rows, limits, height=0.62, color=GREY, alpha=0.5, label="limit of the machines (X*)")
    axes.barh(rows, speeds, height=0.62, color=BLUE, xerr=errors if any(errors) else None, label="achieved")
    style = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8, "color": INK}
    for row, speed, limit in zip(rows, speeds, limits, strict=True):
        axes.annotate(f"{speed:,.4g}/s, {speed / limit:.0%}", (max(speed, limit), row), **style)
    axes.set(xlabel="samples trained per second", title="Throughput")
    axes.margins(x=0.28)
    axes.set_xlim(left=0)
    axes.legend(ncols=2, **BELOW)


def _draw_losses(axes: Any, rows: Any, results: Sequence[Record]) -> None:
    kinds = ("discarded", "filtered", "restarted", "surplus", "masked")
    wasted = np.sum([_means(results, f"wasted_{kind}") for kind in kinds], axis=0)
    axes.barh(rows + 0.22, _means(results, "generator_bubble"), height=0.2, color=SKY, label="generator bubble")
    axes.barh(rows, _means(results, "trainer_idle"), height=0.2, color=ORANGE, label="trainer idle")
    axes.barh(rows - 0.22, wasted, height=0.2, color=PURPLE, label="tokens wasted")
    axes.set(xlabel="share", title="Losses", xlim=(0, 1))
    axes.legend(ncols=3, **BELOW)


def _means(results: Sequence[Record], key: str) -> list[float]:
    return [result["mean"].get(key) or 0.0 for result in results]
