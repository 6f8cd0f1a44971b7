"""Where benchmarks make real runs, and what those runs say of themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from long_answers import write_tasks
from report import commit, environment

from penstock.config import load_config
from penstock.store.index import PoolIndex, read_groups

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "tests" / "training" / "recipes" / "spell_backward.yaml"
SEEDS = (0, 1, 2)
CLOSED_GROUPS = 48
"""Of the closed set."""
FIRST_SAMPLES = 256
GROUP_SIZE = 8
SKIPPED_STEPS = 5
"""At the beginning of a run, before rates are taken."""

LONG: dict[str, Any] = {
    "model": {"max_context": 288, "warm_start": {"steps": 200}},
    "data": {"source": "jsonl", "eval_tasks": 0},
    "env": {"name": "long_answers:Think", "group_size": GROUP_SIZE, "max_new_tokens": 256},
    "scheduler": {"max_staleness": 4, "group_filter": []},
    "rollout": {"slots": 64},
    "trainer": {"groups_per_step": 16, "learning_rate": 1e-7, "checkpoint_every": 1000},
    "observe": {"progress": False, "plots": False, "samples": 0},
}

QUICK: dict[str, dict[str, Any]] = {
    "model": {"warm_start": {"steps": 5}},
    "env": {"max_new_tokens": 48},
    "trainer": {"groups_per_step": 8},
}
"""What the quick form takes of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Where runs are made. One that was made before, with the same words and configuration, is not repeated."""

    runs: Path
    quick: bool
    commits: set[str] = field(default_factory=set)
    """Of the runs that were asked for."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return SEEDS[:1] if self.quick else SEEDS

    def long(
        self,
        name: str,
        overrides: Iterable[str],
        *,
        steps: int,
        seeds: Sequence[int] | None = None,
        spare: bool = False,
    ) -> list[Path]:
        """Runs of the long-tailed task, one per seed, from one warm-started policy. `spare`: the quick form makes no
        such run, and only checks that it could be configured."""
        warm = self._train(self._config(), "warm", 0, ["trainer.steps=1"])
        policy = f"model.path={warm / 'checkpoints' / 'step_1'}"
        steps = min(steps, 8) if self.quick else steps
        settings = [policy, "model.warm_start.steps=0", f"trainer.steps={steps}", *overrides]
        return self._runs(self._config(), name, settings, seeds=seeds or self.seeds, spare=spare)

    def quickstart(self, name: str, overrides: Iterable[str], *, samples: int, spare: bool = False) -> list[Path]:
        """Runs of the quickstart's task over the same number of samples."""
        quick = ["data.eval_tasks=64", "model.warm_start.steps=5", "trainer.total_samples=1024"]
        sizes = quick if self.quick else ["data.eval_tasks=1024", f"trainer.total_samples={samples}"]
        quiet = ["observe.plots=false", "observe.progress=false"]
        settings = [*sizes, "trainer.steps=2000", *quiet, *overrides]
        return self._runs(EXAMPLE, name, settings, seeds=self.seeds, spare=spare)

    def _runs(
        self, config: Path, name: str, settings: Sequence[str], *, seeds: Sequence[int], spare: bool
    ) -> list[Path]:
        if spare and self.quick:
            load_config(config, settings)
            return []
        return [self._train(config, name, seed, settings) for seed in seeds]

    @property
    def closed_set(self) -> Path:
        """The first tasks alone, under the names they have in the whole file."""
        file = self.runs / "closed" / "tasks.jsonl"
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            lines = (self.runs / "tasks.jsonl").read_text().splitlines(keepends=True)
            file.write_text("".join(lines[:CLOSED_GROUPS]))
        return file

    def _config(self) -> Path:
        file = self.runs / "long.yaml"
        if not file.exists():
            self.runs.mkdir(parents=True, exist_ok=True)
            write_tasks(self.runs / "tasks.jsonl", count=30_000, seed=0)
            tree = LONG | {"data": LONG["data"] | {"path": str(self.runs / "tasks.jsonl")}}
            if self.quick:
                tree |= {section: tree[section] | values for section, values in QUICK.items()}
            file.write_text(yaml.safe_dump(tree))
        return file

    def _train(self, config: Path, name: str, seed: int, overrides: Iterable[str]) -> Path:
        run_dir = train_run(config, self.runs, name, seed, overrides)
        self.commits.add(json.loads(_made(run_dir).read_text())["commit"])
        return run_dir


def train_run(config: Path, runs: Path, name: str, seed: int, overrides: Iterable[str]) -> Path:
    """`penstock train CONFIG`, in `runs/<name>-<seed>`. A finished run that was made with the same words and
    configuration is not repeated. Exits if it fails."""
    run_dir = runs / f"{name}-{seed}"
    words = [f"run_id={run_dir.name}", f"runs_dir={runs}", f"seed={seed}", *overrides]
    asked, made = {"config": config.read_text(), "words": words}, _made(run_dir)
    if _completed(run_dir) and made.exists() and asked.items() <= json.loads(made.read_text()).items():
        return run_dir
    shutil.rmtree(run_dir, ignore_errors=True)
    runs.mkdir(parents=True, exist_ok=True)
    made.write_text(json.dumps(asked | {"commit": commit()}))
    started = time.monotonic()
    with (runs / f"{run_dir.name}.log").open("w") as log:
        result = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", "train", str(config), *words],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
    if result.returncode:
        sys.exit(f"{run_dir.name} failed: see {log.name}")
    print(f"{run_dir.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return run_dir


def _made(run_dir: Path) -> Path:
    """What a run was made with, beside it."""
    return run_dir.with_name(f"{run_dir.name}.made.json")


def _completed(run_dir: Path) -> bool:
    try:
        return bool(json.loads((run_dir / "summary.json").read_text())["status"] == "completed")
    except (OSError, ValueError, KeyError):
        return False


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def samples_per_s(run_dir: Path) -> float:
    """Samples trained per second, after the first steps."""
    metrics = lines(run_dir / "metrics.jsonl")[SKIPPED_STEPS - 1 :]
    seconds = metrics[-1]["time"] - metrics[0]["time"]
    return float((metrics[-1]["ledger"]["trained"] - metrics[0]["ledger"]["trained"]) / seconds)


def masked_share(run_dir: Path) -> float:
    """Of the generated tokens, those too old to train."""
    return float(lines(run_dir / "metrics.jsonl")[-1]["tokens_masked_share"])


def idle_fraction(run_dir: Path) -> float:
    """Of the learner."""
    return 1.0 - float(json.loads((run_dir / "summary.json").read_text())["trainer_busy_fraction"])


def eval_after(run_dir: Path) -> float:
    return float(json.loads((run_dir / "summary.json").read_text())["eval_after"])


def decisions(run_dir: Path, decider: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir / "timeline.jsonl") if line.get("decider") == decider]


def ready_times(run_dir: Path) -> list[tuple[float, int]]:
    """(when it became ready, group), in order."""
    kept = (line for line in decisions(run_dir, "filter") if line["reason"] == "kept")
    return [(line["time"], line["group"]) for line in kept]


def first_samples_s(run_dir: Path) -> float:
    """From the first dispatch until so many samples are ready, whatever the learner does with them."""
    ready = ready_times(run_dir)[FIRST_SAMPLES // GROUP_SIZE - 1]
    return float(ready[0] - decisions(run_dir, "dispatch")[0]["time"])


def waits_s(run_dir: Path) -> list[float]:
    """From admission to start, of every group that started."""
    admitted = {line["group"]: line["time"] for line in decisions(run_dir, "admission")}
    started: dict[int, float] = {}
    for line in decisions(run_dir, "dispatch"):
        started.setdefault(line["group"], line["time"])
    return [time - admitted[group] for group, time in started.items() if group in admitted]


def makespan_s(run_dir: Path) -> float:
    """From the first dispatch until every group is ready; for a closed set."""
    return float(ready_times(run_dir)[-1][0] - decisions(run_dir, "dispatch")[0]["time"])


def refill_s(run_dir: Path) -> float | None:
    """Mean time from a weight update until the next groups for an optimizer step are ready; None if none were."""
    times = [time for time, _ in ready_times(run_dir)]
    spans = [line for line in lines(run_dir / "timeline.jsonl") if line.get("kind") == "update_weights"]
    wanted, waits = load_config(run_dir / "config.yaml").trainer.groups_per_step, []
    for updated_at in (span["end"] for span in spans[SKIPPED_STEPS:]):
        later = [time for time in times if time > updated_at]
        if len(later) >= wanted:
            waits.append(later[wanted - 1] - updated_at)
    return fmean(waits) if waits else None


def first_lengths(run_dir: Path) -> float:
    """Mean length of the first samples that are ready."""
    index = PoolIndex(run_dir / "pool")
    try:
        records = index.get_groups([group for _, group in ready_times(run_dir)[: FIRST_SAMPLES // GROUP_SIZE]])
    finally:
        index.close()
    return fmean(episode.response_tokens for record in records for episode in record.episodes)


def mean_length(run_dir: Path) -> float:
    """Of all episodes played."""
    records = read_groups(run_dir, setting="lab")
    return fmean(episode.response_tokens for record in records for episode in record.episodes)


def last_metric(key: str) -> Callable[[Path], float | None]:
    return lambda run_dir: lines(run_dir / "metrics.jsonl")[-1][key]


def trained(run_dir: Path) -> float:
    return float(lines(run_dir / "metrics.jsonl")[-1]["ledger"]["trained"])
