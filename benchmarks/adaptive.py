"""Whether the scheduler adapts as it should: entropy feedback, the trigger `step` with its defaults, and `sjf`.

Simulated clusters of 32 and 1,024 accelerators on a reasoning model's lengths, and real runs on this machine: runs on
the quickstart's task with entropy feedback, and pairs of runs with `fifo` and `sjf` on a task with long-tailed answers.
In these pairs the queue is four times the slots. Finished real runs are kept in `--runs` and not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lab import Lab, first_samples_s, last_metric, lines, waits_s
from report import Benchmark, Figures, publish, runs_dir
from strategies import cluster

from penstock.config import LengthConfig
from penstock.config.scheduling import FeedbackConfig, TriggerConfig
from penstock.scheduler.feedback import Feedback
from penstock.scheduler.length.trust import kendall_tau
from penstock.scheduler.length_prediction import length_predictor
from penstock.scheduler.trigger import Trigger, TriggerState
from penstock.simulator.measures import Measures
from penstock.simulator.prediction import predict
from penstock.types import LearnerState, Task

PATH = (16, 32, 64)
"""N_min while entropy is high, normal and low, in samples."""
MACHINE, SMALL_CLUSTER, LARGE_CLUSTER = "this machine", "32 accelerators", "1,024 accelerators"
STEP_TABLE = "Trigger `step` with its defaults, simulated"
ORDER_TABLE = (
    "`sjf` with its defaults against `fifo`, a queue of four times the slots, lengths known from an earlier epoch"
)


@dataclass(frozen=True)
class Size:
    """Of a simulated cluster."""

    servers: int
    trainer_devices: int
    groups_per_step: int

    @property
    def look_ahead(self) -> int:
        """Four times the slots, in groups."""
        return 4 * self.servers * SLOTS // GROUP_SIZE


CLUSTERS = {SMALL_CLUSTER: Size(24, 8, 128), LARGE_CLUSTER: Size(768, 256, 4096)}
QUICK_CLUSTERS = {SMALL_CLUSTER: Size(24, 8, 128), LARGE_CLUSTER: Size(96, 32, 512)}
SLOTS, GROUP_SIZE = 64, 16
DEVICE_TOKEN_S = 1.075e-4
"""Seconds of one learner's device per token."""
STEPS, QUICK_STEPS = 12, 8
MIXED = {"brief": 15.0, "long": 300.0}
"""Median tokens of the answers of two tags: they differ 20 times."""
BENCHMARK = Benchmark(
    name="adaptive",
    measures=["scheduler", "simulator", "loop.py"],
    figures=[
        *("entropy_path_right", "entropy_path_right_real", "step_trigger_share_of_bound", "tau_mixed_heuristic"),
        *("sjf_first_batch_speedup", "sjf_p99_wait_ratio", "length_ks"),
        *(f"{row}_{figure}".replace(" ", "_") for row in CLUSTERS for figure in ("share_of_bound", "masked_share")),
        *(
            f"{row}_{figure}".replace(" ", "_")
            for row in (MACHINE, *CLUSTERS)
            for figure in ("first_batch_speedup", "p99_wait_ratio", "length_ks")
        ),
    ],
)


def entropy_paths(lab: Lab, figures: Figures) -> None:
    """N_min goes 16, 32, 64 on decaying curves, smooth and noisy, and in a real run."""
    curves = [decaying(half_life, noise) for half_life in (20.0, 80.0, 320.0) for noise in (0.0, 0.1)]
    figures.add("entropy_path_right", [float(min(is_right(path_on(curve)) for curve in curves))])
    settings = [
        *("scheduler.trigger.use=step", f"scheduler.trigger.min_samples={PATH[1]}", "scheduler.trigger.max_wait=500ms"),
        *("scheduler.trigger.feedback.signal=entropy", "scheduler.max_staleness=8"),
    ]
    runs = lab.quickstart("entropy", settings, samples=30_720)
    found = [is_right(int(line["trigger_min_samples"]) for line in lines(run / "metrics.jsonl")) for run in runs]
    figures.add("entropy_path_right_real", map(float, found))


def decaying(half_life: float, noise: float, *, start: float = 2.0, end: float = 0.1) -> list[float]:
    """Entropy that falls to its end, most of it early (arXiv 2505.22617)."""
    draw = random.Random(0)
    steps = range(int(10 * half_life))
    return [(end + (start - end) * 0.5 ** (step / half_life)) * math.exp(draw.gauss(0, noise)) for step in steps]


def path_on(entropies: Sequence[float]) -> list[int]:
    """Return N_min in samples before each step."""
    config = TriggerConfig(min_samples=PATH[1], max_wait="500ms", feedback=FeedbackConfig(signal="entropy"))
    trigger = Trigger(config, group_size=8, groups_per_step=32)
    feedback = Feedback(config.feedback, entropy_gain=1.0, total_steps=len(entropies), min_samples=PATH[1])
    adjustments = [feedback.adjustment]
    for version, entropy in enumerate(entropies, start=1):
        adjustments.append(feedback.observe(LearnerState(policy_version=version, entropy=entropy)))
    states = (TriggerState(num_ready=0, num_accumulated=0, waiting_since=None, factor=a.factor) for a in adjustments)
    return [trigger.thresholds(state).min_groups * 8 for state in states]


def is_right(path: Iterable[int]) -> bool:
    """Return whether the path goes through the three numbers in order, each once."""
    return tuple(number for number, _ in itertools.groupby(path)) == PATH


def simulated(size: Size, *, quick: bool, scheduler: dict[str, Any], **simulator: Any) -> Measures:
    """Return the measures of one simulated run."""
    tree = {
        "rollout": {"servers": size.servers},
        "trainer": {"groups_per_step": size.groups_per_step},
        "scheduler": {"dispatch": {}, "trigger": {}, **scheduler},
    }
    trainer = {"token_s": DEVICE_TOKEN_S / size.trainer_devices, "step_s": 2.0, "publish_s": 1.0}
    shape = {"steps": QUICK_STEPS if quick else STEPS, "warmup_steps": 3, "trainer_devices": size.trainer_devices}
    config = cluster(tree, strategies=["asynchronous"], trainer=trainer, **shape, **simulator)
    (result,) = predict(config).results
    return result.runs[0]


def step_trigger(figures: Figures, *, quick: bool) -> None:
    """The share of the bound that `use: step` reaches with its defaults."""
    shares = []
    for name, size in (QUICK_CLUSTERS if quick else CLUSTERS).items():
        run = simulated(size, quick=quick, scheduler={"trigger": {"use": "step"}}, triggers=["step"])
        shares.append(run.efficiency)
        figures.cell(STEP_TABLE, name, "share_of_bound", [run.efficiency])
        figures.cell(STEP_TABLE, name, "masked_share", [run.wasted_masked])
    figures.add("step_trigger_share_of_bound", [min(shares)])


def shortest_first(lab: Lab, figures: Figures, *, quick: bool) -> None:
    """First batch, waits and length bias of `sjf` against `fifo`."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, size in (QUICK_CLUSTERS if quick else CLUSTERS).items():
        queue = {"dispatch": {"look_ahead": size.look_ahead}}
        fifo, sjf = (
            simulated(size, quick=quick, scheduler=queue, triggers=["compute"], dispatch=[policy])
            for policy in ("fifo", "sjf")
        )
        found[name] = {
            "first_batch_speedup": [(fifo.first_samples_s or math.nan) / (sjf.first_samples_s or math.nan)],
            "p99_wait_ratio": [sjf.wait_p99_s / fifo.wait_p99_s],
            "length_ks": [sjf.length_ks_trained_played],
        }
    pairs = queued_runs(lab)
    found[MACHINE] = {
        "first_batch_speedup": [first_samples_s(fifo) / first_samples_s(sjf) for fifo, sjf in pairs],
        "p99_wait_ratio": [p99_wait_s(sjf) / p99_wait_s(fifo) for fifo, sjf in pairs],
        "length_ks": [last_metric("length_ks")(sjf) or 0.0 for _, sjf in pairs],
    }
    for name, columns in found.items():
        for column, values in columns.items():
            figures.cell(ORDER_TABLE, name, column, values)
    judged = [found[name] for name in (MACHINE, SMALL_CLUSTER) if all(found[name].values())]
    figures.add("sjf_first_batch_speedup", [min(fmean(each["first_batch_speedup"]) for each in judged)])
    figures.add("sjf_p99_wait_ratio", [max(fmean(each["p99_wait_ratio"]) for each in judged)])
    figures.add("length_ks", [max(fmean(each["length_ks"]) for each in judged)])


def queued_runs(lab: Lab) -> list[tuple[Path, Path]]:
    """Return pairs of runs with `fifo` and with `sjf`, one per seed."""
    settings = [*("rollout.slots=32", "scheduler.max_running=32", "scheduler.dispatch.look_ahead=16")]
    for earlier in lab.long("known", [], steps=25, seeds=lab.seeds[:1], spare=True):
        settings.append(f"scheduler.length.learn_from={earlier}")
    fifos, sjfs = (
        lab.long(f"queue_{policy}", [*settings, f"scheduler.dispatch.policy={policy}"], steps=25, spare=True)
        for policy in ("fifo", "sjf")
    )
    return list(zip(fifos, sjfs, strict=True))


def p99_wait_s(run_dir: Path) -> float:
    waits = sorted(waits_s(run_dir))
    return waits[int(0.99 * (len(waits) - 1))]


def mixed_workload(figures: Figures) -> None:
    """Kendall's tau of the heuristic. The answers of one tag are 20 times as long as those of the other."""
    draw = random.Random(0)
    predictor = length_predictor(
        LengthConfig(predictor="heuristic"), limit=lambda task: 4096, temperature=lambda task: 1.0
    )
    pairs = []
    for index in range(1024):
        tag = draw.choice(list(MIXED))
        size = draw.randint(1, 8)
        task = chat_task(tag, index, size, draw)
        lengths = [max(1, round(draw.lognormvariate(math.log(MIXED[tag] * size / 4), 0.4))) for _ in range(8)]
        (predicted,) = predictor.predict([task])
        pairs.append((predicted, fmean(lengths)))
        predictor.observe(task, lengths)
    figures.add("tau_mixed_heuristic", [kendall_tau(pairs[256:])])


def chat_task(tag: str, index: int, size: int, draw: random.Random) -> Task:
    """A sum of `size` numbers to work out, to be answered in a word or step by step, as the tag says."""
    numbers = " + ".join(str(draw.randint(10, 99)) for _ in range(size + 1))
    wish = "Give only the result." if tag == "brief" else "Explain how you work it out."
    chat = [{"role": "system", "content": wish}, {"role": "user", "content": f"What is {numbers}?"}]
    return Task(task_id=f"{tag}/{index}", tag=tag, index=index, payload={"question": chat})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, a smaller cluster")
    parser.add_argument("--runs", type=Path, metavar="DIR", default=Path("runs/adaptive"), help="where runs are kept")
    options = parser.parse_args()
    lab, figures = Lab(runs=runs_dir(options.runs, quick=options.quick), quick=options.quick), Figures()
    lab.runs.mkdir(parents=True, exist_ok=True)
    mixed_workload(figures)
    step_trigger(figures, quick=options.quick)
    entropy_paths(lab, figures)
    shortest_first(lab, figures, quick=options.quick)
    publish(BENCHMARK, figures.flat, options.json, tables=figures.tables, seeds=lab.seeds, runs_of=lab.commits)


if __name__ == "__main__":
    main()
