"""What each scheduling choice is worth, on this machine and (in the simulator) at 1,024 accelerators.

Real runs, three seeds each, on a task with long-tailed answers (`long_answers.py`) whose lengths do not change, since
it is trained at a learning rate of almost nothing; the triggers are compared on the quickstart's task, which is learnt.
A figure is the mean over the seeds; `<figure>_spread` is the largest minus the smallest. Finished runs are kept in
`--runs` and not repeated, so that a benchmark that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from long_answers import write_tasks
from report import publish

from penstock.config import Config
from penstock.simulator.calibration import compare, measured, predicted
from penstock.simulator.recorded import read
from penstock.simulator.report import predict

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "quickstart" / "run.yaml"
SEEDS = (0, 1, 2)
STEPS, SHORT_STEPS = 40, 25
FIRST_SAMPLES = 256
SKIPPED_STEPS = 5
"""At the beginning of a run, before rates are taken."""

LONG: dict[str, Any] = {
    "model": {"max_context": 288, "warm_start": {"steps": 200}},
    "data": {"source": "jsonl", "eval_tasks": 0},
    "env": {"name": "long_answers:Think", "group_size": 8, "max_new_tokens": 256},
    "scheduler": {"max_staleness": 1, "filter_equal_rewards": False},
    "rollout": {"slots": 64},
    "trainer": {"groups_per_step": 16, "learning_rate": 1e-7, "checkpoint_every": 1000},
    "observe": {"progress": False, "plots": False, "samples": 0},
}

MODES = {
    "async": [],
    "sync_split": ["scheduler.mode=synchronous", "scheduler.max_staleness=0"],
    "sync_all_cores": ["scheduler.mode=colocated", "scheduler.max_staleness=0"],
}
POLICIES = {
    "fifo": ["scheduler.dispatch.policy=fifo"],
    "sjf": ["scheduler.dispatch.policy=sjf"],
    "sjf_without_aging": [
        "scheduler.dispatch.policy=sjf",
        "scheduler.dispatch.aging_s=1e9",
        "scheduler.dispatch.max_wait_s=1e9",
    ],
    "ljf": ["scheduler.dispatch.policy=ljf"],
    "probe": ["scheduler.dispatch.policy=probe"],
}
ORDERED = ["scheduler.max_running=64", "scheduler.dispatch.look_ahead=48", "scheduler.dispatch.aging_s=5.0"]
"""Slots are scarce, so that an order means something."""
TRIGGERS = {
    "fixed_batch": ["scheduler.trigger.use=batch"],
    "compute": [],
    "step_fixed": ["scheduler.trigger.use=step", "scheduler.trigger.min_samples=128"],
    **{
        f"step_{signal}": [
            "scheduler.trigger.use=step",
            "scheduler.trigger.min_samples=128",
            f"scheduler.trigger.feedback.signal={signal}",
        ]
        for signal in ("entropy", "time", "noise_scale")
    },
}
TRIGGERS["step_time"].append("trainer.steps=226")  # about as many as its thresholds take for the samples
ELSEWHERE = {
    "few_slots": ["rollout.slots=24"],
    "large_batch": ["trainer.groups_per_step=32", "scheduler.max_staleness=2"],
    "sync_split": MODES["sync_split"],
}
"""Configurations whose throughput the calibrated simulator predicts."""

SIMULATED: dict[str, Any] = {
    "env": {"group_size": 16},
    "rollout": {"servers": 768, "slots": 64},
    "trainer": {"groups_per_step": 512},
    "scheduler": {
        "max_staleness": 2,
        "filter_equal_rewards": False,
        "dispatch": {"aging_s": 600.0, "max_wait_s": 3600.0},
        "trigger": {"min_samples": 512, "max_wait_s": 30.0},
    },
    "simulator": {
        "trainer_devices": 256,
        "trainer": {"token_s": 4.2e-7, "step_s": 2.0, "publish_s": 1.0},
        "engine": {"step_s": 0.012, "sequence_s": 2e-4, "update_s": 2.0},
        "workload": {"median_tokens": 9000.0, "max_tokens": 16_000, "prompt_tokens": 400, "tasks": 4096},
        "strategies": [
            "synchronous",
            "colocated",
            "one_step_off",
            "asynchronous",
            "over_sampling",
            "tail_batching",
            "segments",
        ],
        "dispatch": ["fifo", "sjf", "ljf", "probe"],
        "triggers": ["compute", "step", "batch"],
        "makespan_groups": 8192,
    },
}
"""1,024 accelerators on a reasoning model's lengths (DeepCoder's, as published with PolyTrace), balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Where runs are made."""

    runs: Path
    quick: bool

    @property
    def seeds(self) -> tuple[int, ...]:
        return SEEDS[:1] if self.quick else SEEDS

    def long(self, name: str, overrides: Iterable[str], *, steps: int) -> list[Path]:
        """Runs of the long-tailed task, one per seed, from one warm-started policy."""
        warm = self._train(self._config(), "warm", 0, ["trainer.steps=1"])
        policy = f"model.path={warm / 'checkpoints' / 'step_1'}"
        steps = 12 if self.quick else steps
        settings = [policy, "model.warm_start.steps=0", f"trainer.steps={steps}", *overrides]
        return [self._train(self._config(), name, seed, settings) for seed in self.seeds]

    def quickstart(self, name: str, overrides: Iterable[str], *, samples: int) -> list[Path]:
        """Runs of the quickstart's task over the same number of samples."""
        samples = 2048 if self.quick else samples
        quiet = ["observe.plots=false", "observe.progress=false", "data.eval_tasks=1024"]
        settings = [f"trainer.total_samples={samples}", *quiet, *overrides]
        return [self._train(EXAMPLE, name, seed, settings) for seed in self.seeds]

    def _config(self) -> Path:
        file = self.runs / "long.yaml"
        if not file.exists():
            self.runs.mkdir(parents=True, exist_ok=True)
            write_tasks(self.runs / "tasks.jsonl", count=30_000, seed=0)
            tree = LONG | {"data": LONG["data"] | {"path": str(self.runs / "tasks.jsonl")}}
            file.write_text(yaml.safe_dump(tree))
        return file

    def _train(self, config: Path, name: str, seed: int, overrides: Iterable[str]) -> Path:
        run_dir = self.runs / f"{name}-{seed}"
        if _completed(run_dir):
            return run_dir
        shutil.rmtree(run_dir, ignore_errors=True)
        words = [f"run_id={run_dir.name}", f"runs_dir={self.runs}", f"seed={seed}", *overrides]
        started = time.monotonic()
        with (self.runs / f"{run_dir.name}.log").open("w") as log:
            result = subprocess.run(
                [sys.executable, "-m", "penstock.cli.main", "train", str(config), *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])},
            )
        if result.returncode:
            sys.exit(f"{run_dir.name} failed: see {log.name}")
        print(f"{run_dir.name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        return run_dir


def _completed(run_dir: Path) -> bool:
    try:
        return bool(json.loads((run_dir / "summary.json").read_text())["status"] == "completed")
    except (OSError, ValueError, KeyError):
        return False


# --- what a run says -----------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def samples_per_s(run_dir: Path) -> float:
    """Samples trained per second, after the first steps."""
    metrics = lines(run_dir / "metrics.jsonl")[SKIPPED_STEPS - 1 :]
    seconds = metrics[-1]["time"] - metrics[0]["time"]
    return float((metrics[-1]["ledger"]["trained"] - metrics[0]["ledger"]["trained"]) / seconds)


def idle_fraction(run_dir: Path) -> float:
    """Of the learner."""
    return 1.0 - float(json.loads((run_dir / "summary.json").read_text())["trainer_busy_fraction"])


def eval_after(run_dir: Path) -> float:
    return float(json.loads((run_dir / "summary.json").read_text())["eval_after"])


def decisions(run_dir: Path, decider: str) -> list[dict[str, Any]]:
    return [line for line in lines(run_dir / "timeline.jsonl") if line.get("decider") == decider]


def first_samples_s(run_dir: Path) -> float:
    """From the first dispatch until the learner has been given the first samples."""
    start, given = decisions(run_dir, "dispatch")[0]["time"], 0
    for trigger in decisions(run_dir, "trigger"):
        given += 8 * trigger["groups"]
        if given >= FIRST_SAMPLES:
            return float(trigger["time"] - start)
    raise ValueError(f"{run_dir} trained {given} samples")


def makespan_s(run_dir: Path) -> float:
    """Mean time from the first dispatch of a batch until all of it is ready; for runs whose phases alternate."""
    starts = [line["time"] for line in decisions(run_dir, "dispatch")]
    ends = [line["time"] for line in decisions(run_dir, "trigger")]
    spans, begun = [], 0
    for end in ends:
        spans.append(end - starts[begun])
        begun = next((i for i, start in enumerate(starts) if start > end), begun)
    return fmean(spans[1:])


def last_metric(key: str) -> Callable[[Path], float]:
    return lambda run_dir: float(lines(run_dir / "metrics.jsonl")[-1][key] or 0.0)


def short_bias(run_dir: Path) -> float:
    """Median length of the first trained samples over the median of all: below 1, short answers were trained first."""
    metrics = lines(run_dir / "metrics.jsonl")
    return float(metrics[1]["length_p50_trained"] / metrics[-1]["length_p50_trained"])


# --- the studies ---------------------------------------------------------------------------------------------------


class Figures(dict[str, float]):
    """Means and spreads over seeds."""

    def over(self, key: str, values: Iterable[float]) -> None:
        listed = list(values)
        self[key] = fmean(listed)
        if len(listed) > 1:
            self[f"{key}_spread"] = max(listed) - min(listed)

    def of_runs(self, key: str, runs: Iterable[Path], measure: Callable[[Path], float]) -> None:
        self.over(key, (measure(run) for run in runs))


def overlap(lab: Lab, figures: Figures) -> None:
    """Asynchronous against both synchronous baselines, and against what the split allows."""
    rates = {name: [samples_per_s(run) for run in lab.long(name, MODES[name], steps=STEPS)] for name in MODES}
    for name, values in rates.items():
        figures.over(f"{name}_samples_per_s", values)
    for name in ("sync_split", "sync_all_cores"):
        pairs = zip(rates["async"], rates[name], strict=True)
        figures.over(f"async_speedup_over_{name}", (ours / theirs for ours, theirs in pairs))
    runs = lab.long("async", MODES["async"], steps=STEPS)
    figures.of_runs("share_of_bound", runs, share_of_bound)
    figures.of_runs("busier_half_busy", runs, busier_half)


def share_of_bound(run_dir: Path) -> float:
    """Samples per second over X* of the model that is calibrated on the run: what its machine, split in this way, would
    do if servers decoded with full slots all the time, or the learner never waited, whichever is less."""
    (result,) = predict(compare(run_dir).config).results
    return samples_per_s(run_dir) / result.runs[0].limit_samples_per_s


def busier_half(run_dir: Path) -> float:
    """Busy fraction of learner or generator, whichever is larger."""
    metrics = lines(run_dir / "metrics.jsonl")[SKIPPED_STEPS - 1 :]
    seconds = metrics[-1]["time"] - metrics[0]["time"]
    return max((metrics[-1][key] - metrics[0][key]) / seconds for key in ("trainer_busy_s", "generator_busy_s"))


def calibration(lab: Lab, figures: Figures) -> None:
    """The simulator, calibrated on one run, predicts runs that are configured differently."""
    fitted = compare(lab.long("async", [], steps=STEPS)[0]).config.simulator
    errors = []
    for name, overrides in ELSEWHERE.items():
        runs = lab.long(name, overrides, steps=STEPS if name in MODES else SHORT_STEPS)
        rates = [measured(read(run))["samples_per_s"] for run in runs]
        config = read(runs[0]).config.model_copy(update={"simulator": fitted})
        error = abs(predicted(config)["samples_per_s"] / fmean(rates) - 1)
        figures[f"{name}_prediction_error"] = error
        figures[f"{name}_run_to_run_spread"] = (max(rates) - min(rates)) / fmean(rates)
        errors.append(error)
    figures["calibration_error"] = max(errors)


def order(lab: Lab, figures: Figures) -> None:
    """Dispatch policies: early supply, throughput and bias in a stream; makespan of a closed batch."""
    for name, policy in POLICIES.items():
        streams = lab.long(f"stream_{name}", [*ORDERED, *policy], steps=SHORT_STEPS)
        figures.of_runs(f"{name}_first_{FIRST_SAMPLES}_samples_s", streams, first_samples_s)
        figures.of_runs(f"{name}_samples_per_s", streams, samples_per_s)
        figures.of_runs(f"{name}_length_ks", streams, last_metric("length_ks"))
        figures.of_runs(f"{name}_early_median_length", streams, short_bias)
        if name != "fifo":
            figures.of_runs(f"{name}_tau", streams, last_metric("length_tau"))
        if name != "sjf_without_aging":
            batches = lab.long(f"batch_{name}", [*ORDERED, *policy, *MODES["sync_split"]], steps=15)
            figures.of_runs(f"{name}_makespan_s", batches, makespan_s)


def triggers(lab: Lab, figures: Figures) -> None:
    """Held-out reward and idle learner after the same number of samples."""
    for name, overrides in TRIGGERS.items():
        runs = lab.quickstart(f"trigger_{name}", overrides, samples=30_720)
        figures.of_runs(f"{name}_eval_after", runs, eval_after)
        figures.of_runs(f"{name}_idle_fraction", runs, idle_fraction)
        figures.of_runs(f"{name}_steps", runs, last_metric("step"))
        figures.of_runs(f"{name}_wall_s", runs, last_wall_s)


def last_wall_s(run_dir: Path) -> float:
    metrics = lines(run_dir / "metrics.jsonl")
    return float(metrics[-1]["time"] - metrics[0]["time"])


def simulated(lab: Lab, figures: Figures) -> None:
    """The same strategies, orders and triggers at 1,024 accelerators."""
    steps = 6 if lab.quick else 16
    tree = SIMULATED | {"simulator": SIMULATED["simulator"] | {"steps": steps, "seeds": len(lab.seeds)}}
    report = predict(Config.model_validate(tree))
    for result in report.results:
        name = "sim_" + result.name.replace(" ", "_")
        for key in ("efficiency", "samples_per_s", "trainer_idle", "staleness_mean", "length_ks_trained_population"):
            figures[f"{name}_{key}"] = result.mean(key) or 0.0
        if result.strategy == "asynchronous":
            figures[f"{name}_first_samples_s"] = result.mean("first_samples_s") or 0.0
            figures[f"{name}_first_samples_length_ratio"] = result.mean("first_samples_length_ratio") or 0.0
    for made in report.makespans:
        figures[f"sim_{made.dispatch}_makespan_s"] = fmean(made.seconds)
    ours = figures["sim_asynchronous_samples_per_s"]
    figures["sim_async_speedup_over_sync_split"] = ours / figures["sim_synchronous_samples_per_s"]
    figures["sim_async_speedup_over_sync_all_cores"] = ours / figures["sim_colocated_samples_per_s"]
    figures["sim_share_of_bound"] = figures["sim_asynchronous_efficiency"]


STUDIES = {
    "overlap": overlap,
    "calibration": calibration,
    "order": order,
    "triggers": triggers,
    "simulated": simulated,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"), help="where runs are kept")
    parser.add_argument("--only", choices=list(STUDIES), action="append", help="only these studies")
    options = parser.parse_args()
    lab = Lab(runs=options.runs.resolve(), quick=options.quick)
    lab.runs.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    for name in options.only or STUDIES:
        STUDIES[name](lab, figures)
    publish("ablation", figures, options.json)


if __name__ == "__main__":
    main()
