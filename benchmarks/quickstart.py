"""The quickstart from command to exit: wall time, learning, overlap, overhead outside the models, memory.

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
from report import arguments, publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "quickstart" / "run.yaml"
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


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def first_step_s(run_dir: Path) -> float:
    """Seconds from the start of the run to its first optimizer step."""
    return float(lines(run_dir / "metrics.jsonl")[0]["time"] - lines(run_dir / "events.jsonl")[0]["time"])


def main() -> None:
    options = arguments(__doc__ or "")
    overrides = ["trainer.steps=40", "data.eval_tasks=64"] if options.quick else []
    with tempfile.TemporaryDirectory() as directory:
        wall_s, peak_gb = run(Path(directory), *overrides, "run_id=full")
        run_dir = Path(directory) / "full"
        summary = json.loads((run_dir / "summary.json").read_text())
        run(
            Path(directory),
            "run_id=cold",
            "model.warm_start.steps=0",
            "trainer.steps=2",
            "data.eval_tasks=0",
            "scheduler.group_filter=[]",
        )
        cold_s = first_step_s(Path(directory) / "cold")
        busy = summary["trainer_busy_fraction"] + summary["generator_busy_fraction"]
        figures = {
            "wall_s": wall_s,
            "eval_before": summary["eval_before"],
            "eval_after": summary["eval_after"],
            "eval_gain": summary["eval_after"] - summary["eval_before"],
            "steps": summary["steps"],
            "trajectories": summary["trajectories"],
            "trainer_busy_fraction": summary["trainer_busy_fraction"],
            "generator_busy_fraction": summary["generator_busy_fraction"],
            "busy_sum": busy,
            "overhead_ms_per_episode": overhead_ms(lines(run_dir / "metrics.jsonl")),
            "first_step_without_warm_start_s": cold_s,
            "peak_resident_gb": peak_gb,
            "kl_engine_trainer": summary["kl_engine_trainer"],
            "staleness_mean": summary["staleness_mean"],
        }
    publish("quickstart", figures, options.json)


if __name__ == "__main__":
    main()
