"""The files of a finished run that calibration needs, in the terms of the models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import Config, ConfigError, load_config
from penstock.observe import jsonl
from penstock.observe.summary import read_steps
from penstock.ports.group_records import GroupRecord
from penstock.rollout.costs import PRODUCTS
from penstock.store.index import read_groups

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The contents of a run's files."""

    run_dir: Path
    config: Config
    metrics: Sequence[Record]
    spans: Sequence[Record]
    sums: Mapping[str, float]
    """Sums over the decode steps of all servers; see `rollout/costs.py`."""
    busy_s: float
    """Busy seconds of all servers, on the clock of `sums`."""
    groups: Sequence[GroupRecord]

    def durations(self, kind: str) -> list[float]:
        """Return the seconds of each span of this kind."""
        return [span["end"] - span["start"] for span in self.spans if span["kind"] == kind]

    def busy_within(self, kinds: Sequence[str], start: float, end: float) -> float:
        """Return the seconds of spans of these kinds between two moments."""
        inside = (min(s["end"], end) - max(s["start"], start) for s in self.spans if s["kind"] in kinds)
        return float(sum(max(seconds, 0.0) for seconds in inside))

    def training(self) -> list[tuple[int, int, float]]:
        """Return (calls of accumulate, tokens, seconds) of each optimizer step."""
        tokens: Counter[int] = Counter()
        for group in self.groups:
            if group.trained_in is not None:
                tokens[group.trained_in - 1] += sum(e.prompt_tokens + e.response_tokens for e in group.episodes)
        seconds: defaultdict[int, list[float]] = defaultdict(list)
        for span in self.spans:
            if span["kind"] == "train":
                seconds[span["policy_version"]].append(span["end"] - span["start"])
        return [(len(seconds[v]), tokens[v], sum(seconds[v])) for v in sorted(tokens) if v in seconds]

    def between_calls_s(self) -> float:
        """Return the seconds between two spans of the trainer when the trainer is not kept waiting: the 10th percentile
        of all gaps."""
        own = sorted((s["start"], s["end"]) for s in self.spans if s["kind"] in ("train", "step", "publish"))
        gaps = [later[0] - sooner[1] for sooner, later in pairwise(own)]
        return max(float(np.percentile(gaps, 10)), 0.0) if gaps else 0.0

    def mean_episode_s(self) -> float:
        """Return the mean duration of all training episodes, without failed ones."""
        seconds = [episode.seconds for group in self.groups for episode in group.episodes if episode.status != "failed"]
        return float(np.mean(seconds)) if seconds else 0.0


def read(run_dir: Path) -> RecordedRun:
    """Read a run's files. Raises `ConfigError` that says what is missing."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is no run of Penstock: it has no config.yaml")
    metrics = read_steps(run_dir)
    if len(metrics) < 4:
        raise ConfigError(f"run {run_dir} has {len(metrics)} optimizer steps: too few to calibrate with")
    totals = [e for e in jsonl.read(run_dir / "events.jsonl") if e.get("event") == "process_totals"]
    servers = [e for e in totals if e.get("role") == "rollout"]
    names = ["".join(pair) for pair in PRODUCTS]
    sums = {name: sum(e["counters"].get(f"cost_{name}", 0.0) for e in servers) for name in names}
    if not sums["nn"]:
        raise ConfigError(
            f"run {run_dir} has no decode costs (event process_totals of a rollout process in events.jsonl): it has "
            "not come to its end, or is of an older version"
        )
    return RecordedRun(
        run_dir=run_dir,
        config=load_config(run_dir / "config.yaml"),
        metrics=metrics,
        spans=[line for line in jsonl.read(run_dir / "timeline.jsonl") if "start" in line and "end" in line],
        sums=sums,
        busy_s=sum(e["busy_s"] for e in servers),
        groups=[group for group in read_groups(run_dir, setting="--calibrate") if group.episodes],
    )
