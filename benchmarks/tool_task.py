"""Whether a tiny policy learns to use a tool, in `examples/tools`: three seeds, from command to exit.

`eval_gain_lowest` is the gain in held-out reward of the seed that learns least. `well_formed_before` and
`well_formed_after` are shares of held-out turns in which the policy did what was due, a call or plain text: the
highest of all seeds before training, and the lowest after it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab import SEEDS, lines
from report import Benchmark, Figures, arguments, publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "tools" / "run.yaml"
QUICK = ("model.warm_start.steps=10", "trainer.steps=4", "data.eval_tasks=16", "scheduler.group_filter=[]")
BENCHMARK = Benchmark(
    name="tool_task",
    measures=["envs", "model", "trainer", "scheduler", "rollout", "processes"],
    figures=[
        "eval_before",
        "eval_after",
        "eval_gain_lowest",
        "well_formed_before",
        "well_formed_after",
        "wall_s_longest",
    ],
)


def main() -> None:
    options = arguments(__doc__ or "")
    seeds = SEEDS[:1] if options.quick else SEEDS
    figures, walls, gains, forms = Figures(), list[float](), list[float](), list[list[float]]()
    rewards: list[list[float]] = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in seeds:
            words = [sys.executable, "-m", "penstock.cli.main", "train", str(EXAMPLE), f"runs_dir={directory}"]
            words += [f"seed={seed}", f"run_id=seed_{seed}", *(QUICK if options.quick else ())]
            started = time.monotonic()
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            walls.append(time.monotonic() - started)
            events = lines(Path(directory) / f"seed_{seed}" / "events.jsonl")
            found = [event for event in events if event["event"] == "evaluation"]
            rewards.append([each["reward"] for each in found])
            forms.append([each["metrics"]["well_formed"] for each in found])
            gains.append(rewards[-1][-1] - rewards[-1][0])
    for name, place in (("eval_before", 0), ("eval_after", -1)):
        figures.add(name, [each[place] for each in rewards])
    of_all = {
        "eval_gain_lowest": min(gains),
        "well_formed_before": max(each[0] for each in forms),
        "well_formed_after": min(each[-1] for each in forms),
        "wall_s_longest": max(walls),
    }
    publish(BENCHMARK, figures.flat | of_all, options.json, seeds=seeds)


if __name__ == "__main__":
    main()
