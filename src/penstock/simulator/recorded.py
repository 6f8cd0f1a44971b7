"""What a finished run of Penstock wrote down that calibration needs, in the terms of the models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import Config, ConfigError, load_config
from penstock.observe import jsonl, steps
from penstock.ports import GroupRecord
from penstock.rollout.costs import PRODUCTS
from penstock.store.index import PoolIndex

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The files of a run."""

    run_dir: Path
    config: Config
    metrics: Sequence[Record]
    spans: Sequence[Record]
    sums: Mapping[str, float]
    """Over the decode steps of all servers; see `rollout/costs.py`."""
    busy_s: float
    """Of all servers, on the clock that `sums` were taken with."""
    groups: Sequence[GroupRecord]

    def durations(self, kind: str) -> list[float]:
        """Seconds of each span."""
        return [span["end"] - span["start"] for span in self.spans if span["kind"] == kind]

    def busy_within(self, kinds: Sequence[str], start: float, end: float) -> float:
        """Seconds of the spans that lie between two moments."""
        inside = (min(s["end"], end) - max(s["start"], start) for s in self.spans if s["kind"] in kinds)
        return float(sum(max(seconds, 0.0) for seconds in inside))

    def training(self) -> list[tuple[int, int, float]]:
        """(calls of accumulate, tokens, seconds) of each optimizer step."""
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
        """What lies between two spans of the trainer even when it is not kept waiting."""
        own = sorted((s["start"], s["end"]) for s in self.spans if s["kind"] in ("train", "step", "publish"))
        gaps = [later[0] - sooner[1] for sooner, later in pairwise(own)]
        return max(float(np.percentile(gaps, 10)), 0.0) if gaps else 0.0

    def mean_episode_s(self) -> float:
        """Over all training episodes."""
        seconds = [episode.seconds for group in self.groups for episode in group.episodes if episode.status != "failed"]
        return float(np.mean(seconds)) if seconds else 0.0


def read(run_dir: Path) -> RecordedRun:
    """Raises `ConfigError` that says what is missing."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} is no run of Penstock: it has no config.yaml")
    metrics = steps.read(run_dir)
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
        groups=_groups(run_dir),
    )


def _groups(run_dir: Path) -> list[GroupRecord]:
    if not (run_dir / "pool" / "index").is_dir():
        raise ConfigError(f"run {run_dir} has no pool/index: its lengths are unknown")
    index = PoolIndex(run_dir / "pool")
    try:
        return [group for group in index if group.episodes]
    finally:
        index.close()
