"""`penstock simulate --calibrate RUN`: fit the models to a run, simulate that run, and report the error.

Engine: least squares over the decode steps (from sums that the servers keep). The fit is then scaled from the clock of
those sums to the wall time of the generation spans. Trainer: least squares over optimizer steps, plus the time between
two calls even when no request waits. The remaining time of episodes becomes `latency_s`, so that simulated episodes
last as long as the measured ones.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from penstock.config import Config, ConfigError, load_config
from penstock.config.simulated_cluster import EngineModelConfig, SimulatorConfig, TrainerModelConfig, WorkloadConfig
from penstock.observe import jsonl
from penstock.observe.summary import read_steps
from penstock.ports.group_records import GroupRecord
from penstock.rollout.costs import PRODUCTS
from penstock.simulator import fitting
from penstock.simulator.fitting import non_negative
from penstock.simulator.measures import Measures
from penstock.simulator.prediction import predict
from penstock.store.index import read_groups

MAX_STEPS = 100
"""Maximum number of simulated optimizer steps; the rates settle long before."""
LATENCY_TRIES, LATENCY_TOLERANCE = 4, 0.01
NARROW = 0.2
"""Smallest relative spread of active sequences at which the cost of a step and the cost of a sequence can be told
apart."""
LATENCY_SHOWS = 0.3
"""Smallest growth of an episode's duration, as a share of the added latency, that counts as an effect."""
FIGURES = ("samples_per_s", "generator_busy", "trainer_busy", "episode_s")

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
        own = sorted((s["start"], s["end"]) for s in self.spans if s["kind"] in ("train", "step"))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Measured figures of a run beside those of its simulation."""

    config: Config
    """The run's configuration with the fitted `simulator` section."""
    measured: dict[str, float]
    predicted: dict[str, float]
    caveat: str | None
    """A warning about values that the run does not determine and the fit had to guess; None without such values."""

    def error(self, figure: str) -> float:
        """Return the error of the prediction, relative to the measured value."""
        measured = self.measured[figure]
        return (self.predicted[figure] - measured) / measured if measured else 0.0

    def plain(self) -> dict[str, Any]:
        """Return the comparison as plain values for JSON."""
        return {
            "measured": self.measured,
            "predicted": self.predicted,
            "error": {figure: self.error(figure) for figure in FIGURES},
            "caveat": self.caveat,
            "simulator": self.config.simulator.model_dump(mode="json"),
        }


def calibrate(run_dir: Path) -> SimulatorConfig:
    """Return the `simulator` section that fits a finished run. Raises `ConfigError` if the run's files do not hold
    enough data, or cannot be used."""
    with _reading(run_dir):
        return _fit(read(run_dir))[0].simulator


def compare(run_dir: Path) -> Comparison:
    """Calibrate, simulate the run's own configuration, and return measured and predicted figures. Raises `ConfigError`
    as `calibrate` does."""
    with _reading(run_dir):
        run = read(run_dir)
        config, measures = _fit(run)
        return Comparison(config=config, measured=measured(run), predicted=predicted(measures), caveat=_caveat(run))


@contextmanager
def _reading(run_dir: Path) -> Iterator[None]:
    """Raise `ConfigError` for records that are no numbers, or numbers that no run has."""
    try:
        yield
    except ConfigError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, np.linalg.LinAlgError) as error:
        raise ConfigError(
            f"the files of run {run_dir} are damaged ({type(error).__name__}: {error}): metrics.jsonl, events.jsonl or "
            "timeline.jsonl has a record that no run writes; calibrate on another run"
        ) from error


def _caveat(run: RecordedRun) -> str | None:
    """Return a warning if nearly all steps had the same number of sequences. Such steps cannot separate the cost of a
    step from the cost of each sequence."""
    mean = run.sums["nb"] / run.sums["nn"]
    spread = math.sqrt(max(run.sums["bb"] / run.sums["nn"] - mean * mean, 0.0))
    if spread >= NARROW * mean:
        return None
    return (
        f"decode steps of this run had {mean:.0f} ± {spread:.0f} sequences: what emptier servers take is a guess. "
        "A run with evaluations (data.eval_tasks) shows the servers draining, too"
    )


def measured(run: RecordedRun) -> dict[str, float]:
    """Return the run's figures after its first tenth."""
    first, last = run.metrics[_warmup(len(run.metrics)) - 1], run.metrics[-1]
    start, end = first["time"], last["time"]
    servers = run.config.rollout.num_servers
    return {
        "samples_per_s": (last["ledger"]["trained"] - first["ledger"]["trained"]) / (end - start),
        "generator_busy": run.busy_within(["generate"], start, end) / (end - start) / servers,
        "trainer_busy": run.busy_within(["train", "step"], start, end) / (end - start),
        "episode_s": run.mean_episode_s(),
    }


def predicted(measures: Measures) -> dict[str, float]:
    """Return the same figures of a simulation."""
    return {
        "samples_per_s": measures.samples_per_s,
        "generator_busy": 1 - measures.generator_idle,
        "trainer_busy": 1 - measures.trainer_idle,
        "episode_s": measures.episode_s,
    }


def _simulated(config: Config) -> Measures:
    (result,) = predict(config).results
    return result.runs[0]


def _fit(run: RecordedRun) -> tuple[Config, Measures]:
    """Return the run's configuration with the fitted section, and its simulation."""
    steps = min(len(run.metrics), MAX_STEPS)
    simulator = SimulatorConfig(
        engine=fit_engine(run),
        trainer=fit_trainer(run),
        workload=WorkloadConfig(source="run", path=str(run.run_dir)),
        strategies=["configured"],
        steps=steps,
        warmup_steps=_warmup(steps),
    )
    config = run.config.model_copy(update={"simulator": simulator})
    return _with_latency(config, run.mean_episode_s(), _grants_per_episode(run))


def _warmup(steps: int) -> int:
    return max(steps // 10, 1)


def fit_engine(run: RecordedRun) -> EngineModelConfig:
    """Fit the seconds of a step, on the clock of the generation spans."""
    spans_s = sum(run.durations("generate"))
    stretch = max(spans_s / run.busy_s, 1.0) if run.busy_s else 1.0
    return fitting.fit_engine(run.sums, update_s=_mean(run.durations("update_weights")), stretch=stretch)


def fit_trainer(run: RecordedRun) -> TrainerModelConfig:
    """Fit the seconds of an optimizer step's gradients as a linear function of calls and tokens."""
    rows = np.array([row[:2] for row in run.training()], dtype=np.float64).reshape(-1, 2)
    seconds = np.array([row[2] for row in run.training()], dtype=np.float64)
    call_s, token_s = non_negative(rows.T @ rows, rows.T @ seconds)
    between_s = run.between_calls_s()
    return TrainerModelConfig(
        token_s=token_s,
        call_s=call_s + between_s,
        step_s=_mean(run.durations("step")) + between_s,
        publish_s=_mean(run.durations("publish")),
    )


def _with_latency(config: Config, episode_s: float, grants: float) -> tuple[Config, Measures]:
    """Raise latency_s until simulated episodes take as long as measured ones. If slots are scarce, latency does not
    lengthen episodes; it cannot be measured then, and stays as it is."""
    measures = _simulated(config)
    for _ in range(LATENCY_TRIES):
        missing_s = episode_s - measures.episode_s
        added_s = max(missing_s / grants, -config.simulator.engine.latency_s)
        if abs(missing_s) <= LATENCY_TOLERANCE * episode_s or added_s == 0:
            break
        engine = config.simulator.engine
        engine = engine.model_copy(update={"latency_s": engine.latency_s + added_s})
        later = config.model_copy(update={"simulator": config.simulator.model_copy(update={"engine": engine})})
        found = _simulated(later)
        if (found.episode_s - measures.episode_s) / (added_s * grants) < LATENCY_SHOWS:
            break
        config, measures = later, found
    return config, measures


def _grants_per_episode(run: RecordedRun) -> float:
    """Return the mean number of grants per episode: one per turn, or one per segment of a turn."""
    length = run.config.scheduler.segment_length or math.inf
    episodes = [episode for group in run.groups for episode in group.episodes]
    grants = [e.num_turns * max(math.ceil(e.response_tokens / max(e.num_turns, 1) / length), 1) for e in episodes]
    return max(_mean(grants), 1.0)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
