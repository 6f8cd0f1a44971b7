"""The quickstart from command to exit: wall time, learning, overlap, overhead outside the models, memory.

The figures are means over three seeds. `eval_after_lowest` is of the seed that learns least, `wall_s_longest` of the
slowest, and `alarms` is their sum.
`overhead_ms_per_episode` is the CPU time of all processes of the run minus the model compute of server and trainer,
between the first and the last optimizer step, per finished training episode.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from lab import SEEDS, lines
from report import Benchmark, Figures, arguments, publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart" / "run.yaml"
SUMMED = (
    "eval_before",
    "eval_after",
    "steps",
    "trajectories",
    "trainer_busy_fraction",
    "generator_busy_fraction",
    "kl_engine_trainer",
    "staleness_mean",
)
"""Figures that the run's summary has."""
BENCHMARK = Benchmark(
    name="quickstart",
    measures=["."],
    figures=[
        *SUMMED,
        "wall_s",
        "wall_s_longest",
        "eval_after_lowest",
        "alarms",
        "eval_gain",
        "busy_sum",
        "overhead_ms_per_episode",
        "first_step_without_warm_start_s",
        "peak_resident_gb",
    ],
)
SAMPLE_S = 1.0


def run(runs: Path, *overrides: str) -> tuple[float, float]:
    """Train; returns (wall seconds from command to exit, peak resident GB of all processes together)."""
    words = [sys.executable, "-m", "penstock.cli.main", "train", str(EXAMPLE), f"runs_dir={runs}", *overrides]
    started, peak = time.monotonic(), 0
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, resident_bytes(process.pid))
            time.sleep(SAMPLE_S)
    if process.returncode:
        sys.exit(f"the run failed with code {process.returncode}")
    return time.monotonic() - started, peak / 1e9


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its descendants; shared pages count once per process."""
    total = 0
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def overhead_ms(metrics: list[dict[str, Any]]) -> float:
    """CPU milliseconds per episode outside the models."""
    first, last = metrics[0], metrics[-1]

    def spent(line: dict[str, Any]) -> float:
        return float(line["cpu_s"] - line["trainer_busy_s"] - line["generator_busy_s"])

    return 1e3 * (spent(last) - spent(first)) / float(last["episodes_total"] - first["episodes_total"])


def first_step_s(run_dir: Path) -> float:
    """Seconds from the start of the run to its first optimizer step."""
    return float(lines(run_dir / "metrics.jsonl")[0]["time"] - lines(run_dir / "events.jsonl")[0]["time"])


def alarms(run_dir: Path) -> int:
    """Number of alarms of a run."""
    return sum(line["event"] == "alarm" for line in lines(run_dir / "events.jsonl"))


def main() -> None:
    options = arguments(__doc__ or "")
    seeds = SEEDS[:1] if options.quick else SEEDS
    overrides = ["model.warm_start.steps=30", "trainer.steps=12", "data.eval_tasks=32"] if options.quick else []
    found: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            wall_s, peak_gb = run(Path(directory), *overrides, f"seed={seed}", f"run_id=seed_{seed}")
            run_dir = Path(directory) / f"seed_{seed}"
            summary = json.loads((run_dir / "summary.json").read_text())
            found.append(
                {name: summary[name] for name in SUMMED}
                | {
                    "wall_s": wall_s,
                    "eval_gain": summary["eval_after"] - summary["eval_before"],
                    "busy_sum": summary["trainer_busy_fraction"] + summary["generator_busy_fraction"],
                    "overhead_ms_per_episode": overhead_ms(lines(run_dir / "metrics.jsonl")),
                    "peak_resident_gb": peak_gb,
                    "alarms": alarms(run_dir),
                }
            )
        run(
            Path(directory),
            "run_id=cold",
            "model.warm_start.steps=0",
            "trainer.steps=2",
            "data.eval_tasks=0",
            "scheduler.group_filter=[]",
        )
        cold_s = first_step_s(Path(directory) / "cold")
    figures = Figures()
    for name in found[0].keys() - {"alarms"}:
        figures.add(name, [each[name] for each in found])
    of_all = {
        "eval_after_lowest": min(each["eval_after"] for each in found),
        "wall_s_longest": max(each["wall_s"] for each in found),
        "first_step_without_warm_start_s": cold_s,
        "alarms": sum(each["alarms"] for each in found),
    }
    publish(BENCHMARK, figures.flat | of_all, options.json, seeds=seeds)


if __name__ == "__main__":
    main()
