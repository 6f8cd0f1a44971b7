"""What every objective makes of data that are exactly k versions old.

A deterministic-lag harness: policy and engine in one process, the engine always serves the weights of k optimizer steps
ago, and everything it generates is trained at once. The quickstart's task and learning rate from one warm-started
policy. First every objective at every lag with one seed; then the three best at lag 8, the recommended, the default and
the naive one, with three others, which alone are shown of these. `pois` is not here: where one version makes a whole
answer, it is `reinforce`. Reward is that of answers sampled for held-out tasks, after training.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
import torch
from lab import EXAMPLE
from objective_lab import Lab, Outcome, Size, Stage, options, streams, with_objective
from report import Benchmark, Figures, publish

from penstock.config import load_config
from penstock.trainer.losses.objective import OBJECTIVES

LAGS, SCREENED, SEEDS = (0, 1, 2, 4, 8, 16), 0, (1, 2, 3)
NAIVE, DEFAULT, RECOMMENDED = "reinforce", "ppo", "decoupled_snapshot"
"""The default is for the default `scheduler.max_staleness` of 2, the recommended one for much staler data."""
VARIANTS: dict[str, dict[str, Any]] = {name: {"name": name} for name in OBJECTIVES if name != "pois"} | {
    "m2po": {"name": "m2po", "second_moment_over": "sample"},
    "decoupled_snapshot": {"name": "decoupled", "proximal": "snapshot"},
}
TABLE = "Held-out reward after training on data k versions old"
COMPARED = {"recommended": RECOMMENDED, "default": DEFAULT, "naive": NAIVE}
BENCHMARK = Benchmark(
    name="staleness",
    measures=["trainer", "rollout", "model"],
    figures=[
        *(f"{name}_k={lag}" for name in VARIANTS for lag in LAGS),
        *(f"{label}_reward_at_8_vs_0" for label in COMPARED),
    ],
)


class Cell(NamedTuple):
    """One run."""

    objective: str
    lag: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.objective}-{self.lag}-{self.seed}"


def train(cell: Cell, policy: Path, size: Size) -> Outcome:
    """One run."""
    config = with_objective(load_config(EXAMPLE), VARIANTS[cell.objective], seed=cell.seed)
    stage = Stage(config, policy, max_staleness=cell.lag, seed=cell.seed)
    tasks, held_out = streams(config, cell.seed)
    past: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=cell.lag + 1)
    rewards = []
    for step in range(size.steps):
        past.append(stage.weights())
        stage.serve(*past[0])  # the first ones while there are none so old
        samples = stage.play(tasks.take(size.groups), group_size=config.env.group_size, salt=f"train {step}")
        rewards.append(fmean(sample.reward for sample in samples))
        stage.step(samples)
    return stage.outcome(policy, held_out[: size.held_out], rewards)


def plot(found: dict[Cell, Outcome], file: Path) -> None:
    """Reward over lag, a line per objective."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    axes.set_prop_cycle(color=[plt.get_cmap("tab20")(number) for number in range(20)])
    for name in dict.fromkeys(cell.objective for cell in found):
        means = [
            fmean(outcome.reward for cell, outcome in found.items() if (cell.objective, cell.lag) == (name, lag))
            for lag in LAGS
        ]
        axes.plot(
            range(len(LAGS)), means, marker="o", label=name, linewidth=2.5 if name in (DEFAULT, RECOMMENDED) else 1
        )
    axes.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
    axes.set(xlabel="versions between sampling and training", ylabel="held-out reward after training")
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    given = options(__doc__, BENCHMARK.name)
    lab = Lab(load_config(EXAMPLE), train, given)
    found = lab.all([Cell(name, lag, SCREENED) for name in VARIANTS for lag in LAGS])
    ranked = sorted(VARIANTS, key=lambda name: found[Cell(name, 8, SCREENED)].reward, reverse=True)
    finalists = list(dict.fromkeys([*ranked[:3], RECOMMENDED, DEFAULT, NAIVE]))
    if not given.quick:
        found = {cell: outcome for cell, outcome in found.items() if cell.objective not in finalists}
        found |= lab.all([Cell(name, lag, seed) for name in finalists for lag in LAGS for seed in SEEDS])
    figures = Figures()
    for name in VARIANTS:
        for lag in LAGS:
            mine = [outcome for cell, outcome in found.items() if (cell.objective, cell.lag) == (name, lag)]
            figures.cell(TABLE, name, f"k={lag}", (outcome.reward for outcome in mine))
    for label, name in COMPARED.items():
        fresh, stale = figures.flat[f"{name}_k=0"], figures.flat[f"{name}_k=8"]
        figures.add(f"{label}_reward_at_8_vs_0", [stale / fresh if fresh else None])
    publish(BENCHMARK, figures.flat, given.json, tables=figures.tables, seeds=SEEDS)
    if given.plot:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
