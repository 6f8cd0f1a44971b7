"""What each scheduling choice is worth on this machine; `strategies.py` says what it is worth at 1,024 accelerators.

Real runs, three seeds each, on a task with long-tailed answers (`long_answers.py`) whose lengths do not change, since
it is trained at a learning rate of almost nothing; the triggers are compared on the quickstart's task, which is learnt.
A figure is the mean over the seeds; `<figure>_spread` is the largest minus the smallest. Finished runs are kept in
`--runs` and not repeated, so that a benchmark that was interrupted goes on.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean

from lab import (
    CLOSED_GROUPS,
    FIRST_SAMPLES,
    SKIPPED_STEPS,
    Lab,
    eval_after,
    first_lengths,
    first_samples_s,
    idle_fraction,
    last_metric,
    lines,
    makespan_s,
    masked_share,
    mean_length,
    refill_s,
    samples_per_s,
    trained,
)
from report import Benchmark, Figures, publish, runs_dir

from penstock.config import Config, SimulatorConfig, load_config
from penstock.simulator.calibration import calibrate, predicted
from penstock.simulator.measures import Measures
from penstock.simulator.prediction import predict

STEPS, SHORT_STEPS = 40, 25

MODES_TABLE = "Modes, long-tailed task"
ORDER_TABLE = "Dispatch order, long-tailed task, lengths known from an earlier run"
TRIGGER_TABLE = "Triggers, quickstart's task, equal samples"
CALIBRATION_TABLE = "Throughput predicted by the simulator, calibrated on one asynchronous run"

MODES = {
    "async": [],
    "sync_split": ["scheduler.mode=synchronous", "scheduler.max_staleness=0"],
    "sync_all_cores": ["scheduler.mode=colocated", "scheduler.max_staleness=0", "rollout.servers=2"],
}
BASELINES = ("sync_split", "sync_all_cores")
"""All cores: one server each, since a model this small decodes no faster on two threads (slower, in fact)."""
POLICIES = {
    "fifo": ["scheduler.dispatch.policy=fifo"],
    "sjf": ["scheduler.dispatch.policy=sjf"],
    "sjf_without_aging": [
        "scheduler.dispatch.policy=sjf",
        "scheduler.dispatch.aging=1000h",
        "scheduler.dispatch.max_wait=1000h",
    ],
    "ljf": ["scheduler.dispatch.policy=ljf"],
    "probe": ["scheduler.dispatch.policy=probe"],
}
ORDERED = ["scheduler.max_running=64", "scheduler.dispatch.look_ahead=48", "scheduler.dispatch.aging=5s"]
"""Slots are scarce, so that an order means something."""
CLOSED = [
    "scheduler.mode=synchronous",
    "scheduler.max_staleness=0",
    f"trainer.groups_per_step={CLOSED_GROUPS}",
    f"scheduler.dispatch.look_ahead={CLOSED_GROUPS}",
]
"""One batch, all of it there from the start."""
STEP = ["scheduler.trigger.use=step", "scheduler.trigger.min_samples=128", "scheduler.max_staleness=3"]
"""Half the samples of a step of the others at twice the staleness: as many groups in flight."""
TRIGGERS = {
    "fixed_batch": ["scheduler.trigger.use=batch"],
    "compute": [],
    "step_fixed": STEP,
    "step_entropy": [*STEP, "scheduler.trigger.feedback.signal=entropy"],
    "step_time": [*STEP, "scheduler.trigger.feedback.signal=time", "trainer.steps=222"],
    "step_noise_scale": [*STEP, "scheduler.trigger.feedback.signal=noise_scale"],
}
"""A schedule over time must know the steps there will be: 222 of 64 to 256 samples are the samples of the others."""
DRAINING = ["data.eval_tasks=256", "env.eval_temperature=1.0"]
"""Evaluations leave the servers with fewer and fewer answers: what steps of few sequences take shows only then."""
ELSEWHERE = {
    "few_slots": ["rollout.slots=24"],
    "large_batch": ["trainer.groups_per_step=32", "scheduler.max_staleness=2"],
    "sync_split": MODES["sync_split"],
}
"""Configurations whose throughput the calibrated simulator predicts."""
RATES = ("samples_per_s", "trainer_idle", "masked_share")
ORDER = (
    *(f"first_{FIRST_SAMPLES}_samples_s", f"first_{FIRST_SAMPLES}_samples_length_ratio"),
    *("refill_s", "samples_per_s", "length_ks", "oldest_wait_s", "length_tau"),
)
TRIGGER = ("eval_after", "idle_fraction", "steps", "samples", "wall_s")
PREDICTED = ("measured_samples_per_s", "predicted_samples_per_s", "error", "allowed_error")
WITHOUT_MAKESPAN = "sjf_without_aging"
BENCHMARK = Benchmark(
    name="ablation",
    measures=["scheduler", "simulator", "trainer", "rollout", "processes", "loop.py", "system.py"],
    figures=[
        *(f"{row}_{figure}" for row in MODES for figure in RATES),
        *(f"async_speedup_over_{baseline}" for baseline in BASELINES),
        *("share_of_bound", "busier_half_busy", "calibration_error"),
        *(f"{row}_{figure}" for row in ELSEWHERE for figure in PREDICTED),
        *(f"{row}_{figure}" for row in POLICIES for figure in ORDER),
        *(f"{row}_makespan_s" for row in POLICIES if row != WITHOUT_MAKESPAN),
        *(f"{row}_{figure}" for row in TRIGGERS for figure in TRIGGER),
    ],
)


def overlap(lab: Lab, figures: Figures) -> None:
    """Asynchronous against both synchronous baselines, and against what the split allows."""
    runs = {name: lab.long(name, overrides, steps=STEPS, spare=name in BASELINES) for name, overrides in MODES.items()}
    rates = {name: [samples_per_s(run) for run in runs[name]] for name in MODES}
    for name in MODES:
        figures.cell(MODES_TABLE, name, "samples_per_s", rates[name])
        figures.cell(MODES_TABLE, name, "trainer_idle", map(idle_fraction, runs[name]))
        figures.cell(MODES_TABLE, name, "masked_share", map(masked_share, runs[name]))
    for name in BASELINES:
        pairs = zip(rates["async"] if rates[name] else (), rates[name], strict=True)
        figures.add(f"async_speedup_over_{name}", (ours / theirs for ours, theirs in pairs))
    fitted = calibrated(lab)
    figures.add("share_of_bound", (share_of_bound(run, fitted) for run in runs["async"]))
    figures.add("busier_half_busy", map(busier_half, runs["async"]))


def calibrated(lab: Lab) -> SimulatorConfig:
    """The simulator fitted to one asynchronous run."""
    fewer = ["data.eval_tasks=32"] if lab.quick else []
    (run_dir,) = lab.long("calibrating", [*MODES["async"], *DRAINING, *fewer], steps=STEPS, seeds=lab.seeds[:1])
    return calibrate(run_dir)


def share_of_bound(run_dir: Path, fitted: SimulatorConfig) -> float:
    """Samples per second over X*: what the machine, split in this way, would do if servers decoded with full slots all
    the time, or the learner never waited, whichever is less."""
    config = load_config(run_dir / "config.yaml").model_copy(update={"simulator": fitted})
    return samples_per_s(run_dir) / simulated_run(config).limit_samples_per_s


def simulated_run(config: Config) -> Measures:
    """The run that `config` describes, on the machine that its `simulator` section does."""
    (result,) = predict(config).results
    return result.runs[0]


def busier_half(run_dir: Path) -> float:
    """Busy fraction of learner or generator, whichever is larger."""
    metrics = lines(run_dir / "metrics.jsonl")[SKIPPED_STEPS - 1 :]
    seconds = metrics[-1]["time"] - metrics[0]["time"]
    busy = (metrics[-1][key] - metrics[0][key] for key in ("trainer_busy_s", "generator_busy_s"))
    return float(max(busy) / seconds)


def calibration(lab: Lab, figures: Figures) -> None:
    """The simulator, calibrated on one run, predicts runs that are configured differently."""
    fitted, errors = calibrated(lab), []
    for name, overrides in ELSEWHERE.items():
        is_mode = name in MODES
        runs = lab.long(name, overrides, steps=STEPS if is_mode else SHORT_STEPS, spare=not is_mode)
        if not runs:
            for column in PREDICTED:
                figures.cell(CALIBRATION_TABLE, name, column, [])
            continue
        rates = [samples_per_s(run) for run in runs]
        config = load_config(runs[0] / "config.yaml").model_copy(update={"simulator": fitted})
        foreseen = predicted(simulated_run(config))["samples_per_s"]
        errors.append(abs(foreseen / fmean(rates) - 1))
        spread = (max(rates) - min(rates)) / fmean(rates)
        figures.cell(CALIBRATION_TABLE, name, "measured_samples_per_s", rates)
        figures.cell(CALIBRATION_TABLE, name, "predicted_samples_per_s", [foreseen])
        figures.cell(CALIBRATION_TABLE, name, "error", [errors[-1]])
        figures.cell(CALIBRATION_TABLE, name, "allowed_error", [max(0.1, 2 * spread)])
    figures.add("calibration_error", [max(errors)])


def order(lab: Lab, figures: Figures) -> None:
    """Dispatch policies: early supply, refill, throughput and bias in a stream; makespan of a closed set. Lengths are
    known from an earlier run on the same tasks, as in a second epoch."""
    (earlier, *_) = lab.long("async", MODES["async"], steps=STEPS)
    known = f"scheduler.length.learn_from={earlier}"
    usual = mean_length(earlier)
    for name, policy in POLICIES.items():
        streams = lab.long(f"stream_{name}", [*ORDERED, *policy, known], steps=SHORT_STEPS, spare=True)
        figures.cell(ORDER_TABLE, name, f"first_{FIRST_SAMPLES}_samples_s", map(first_samples_s, streams))
        ratios = (first_lengths(run) / usual for run in streams)
        figures.cell(ORDER_TABLE, name, f"first_{FIRST_SAMPLES}_samples_length_ratio", ratios)
        figures.cell(ORDER_TABLE, name, "refill_s", map(refill_s, streams))
        figures.cell(ORDER_TABLE, name, "samples_per_s", map(samples_per_s, streams))
        for metric in ("length_ks", "oldest_wait_s", "length_tau"):
            figures.cell(ORDER_TABLE, name, metric, map(last_metric(metric), streams))
        if name != WITHOUT_MAKESPAN:
            tasks = f"data.path={lab.closed_set}"
            closed = lab.long(f"closed_{name}", [*ORDERED, *policy, *CLOSED, known, tasks], steps=1, spare=True)
            figures.cell(ORDER_TABLE, name, "makespan_s", map(makespan_s, closed))


def triggers(lab: Lab, figures: Figures) -> None:
    """Held-out reward and idle learner after the same number of samples."""
    for name, overrides in TRIGGERS.items():
        runs = lab.quickstart(f"trigger_{name}", overrides, samples=30_720, spare=name != "compute")
        figures.cell(TRIGGER_TABLE, name, "eval_after", map(eval_after, runs))
        figures.cell(TRIGGER_TABLE, name, "idle_fraction", map(idle_fraction, runs))
        figures.cell(TRIGGER_TABLE, name, "steps", map(last_metric("step"), runs))
        figures.cell(TRIGGER_TABLE, name, "samples", map(trained, runs))
        figures.cell(TRIGGER_TABLE, name, "wall_s", map(last_wall_s, runs))


def last_wall_s(run_dir: Path) -> float:
    metrics = lines(run_dir / "metrics.jsonl")
    return float(metrics[-1]["time"] - metrics[0]["time"])


STUDIES = {
    "overlap": overlap,
    "calibration": calibration,
    "order": order,
    "triggers": triggers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps; some variants are only checked")
    parser.add_argument("--runs", type=Path, default=Path("runs/ablation"), help="where runs are kept")
    parser.add_argument("--only", choices=list(STUDIES), action="append", help="only these studies")
    options = parser.parse_args()
    lab = Lab(runs=runs_dir(options.runs, quick=options.quick), quick=options.quick)
    lab.runs.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    for name in options.only or STUDIES:
        STUDIES[name](lab, figures)
    publish(
        BENCHMARK,
        figures.flat,
        options.json,
        tables=figures.tables,
        seeds=lab.seeds,
        runs_of=lab.commits,
        partial=bool(options.only),
    )


if __name__ == "__main__":
    main()
