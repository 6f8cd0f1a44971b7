"""Many processes against one, and against what carries their calls.

Ranks against one: the same global batch, trained by one process and by two over gloo, in float32.

Every step's samples are dealt as a run deals them, and reach the learner in two calls. A loss differs by its difference
over the largest loss of all steps (that of a policy against itself may be zero); weights differ, after the last step,
by the norm of their difference over their norm. The largest of each is reported, and over both strategies as
`two_rank_loss_difference` and `two_rank_weight_difference`. Group calls against bare calls of Ray: see `bare_ray`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch
from bare_ray import cluster, on_ray
from lab import EXAMPLE
from learner import make_batch, setting_on
from report import Benchmark, arguments, publish
from safetensors.torch import load_file
from torch import Tensor

from penstock.config import Config
from penstock.groups.batch import Batch
from penstock.groups.spawned import SpawnedBackend
from penstock.processes.layout import model_dir, prepare
from penstock.processes.trainer import trainer_roles
from penstock.supervisor.janitor import RUNTIME_DIR
from penstock.trainer.actor_critic import ActorCritic
from penstock.weights.publication import await_handle

NUM_RANKS = 2
STRATEGIES = ("ddp", "fsdp")
DIFFERENCES = ("two_rank_loss_difference", "two_rank_weight_difference")
BENCHMARK = Benchmark(
    name="cluster",
    measures=["cluster", "groups", "trainer", "processes"],
    figures=[
        *DIFFERENCES,
        *(f"{difference}_{strategy}" for difference in DIFFERENCES for strategy in STRATEGIES),
        *("quickstart_eval_before", "quickstart_eval_after", "quickstart_wall_s"),
        *("place_1000_bundles_s", "call_vs_bare_ray", "call_ms"),
        *("dispatch_collect_vs_bare_ray", "dispatch_collect_mb_per_s"),
    ],
)
LIMIT_S = 1800
"""For the quickstart."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a group of ranks made of the batch."""

    losses: list[float]
    weights: dict[str, Tensor]


def configured(num_ranks: int, strategy: str) -> Config:
    distributed = {"ranks": num_ranks, "distributed": {"strategy": strategy}}
    trainer = {"learning_rate": 3e-4, "warmup_steps": 0, **distributed}
    return Config.model_validate({"scheduler": {"max_staleness": 1000}, "trainer": trainer})


def train(num_ranks: int, strategy: str, batch: Batch, steps: int, directory: Path) -> Trained:
    config = configured(num_ranks, strategy)
    prepare(config, directory)
    roles = trainer_roles(
        config,
        lambda together, numbers: SpawnedBackend(together, len(numbers)),
        model_dir=model_dir(config, directory),
        weights_dir=directory / "weights",
    )
    ranks = ActorCritic(roles, config.trainer)
    try:
        ranks.begin(0, directory / "beginning")
        losses = []
        for _ in range(steps):
            cut = len(batch) // 3
            for part in (batch.select(range(cut)), batch.select(range(cut, len(batch)))):
                ranks.accumulate(part)
            losses.append(ranks.step().metrics["loss"])
        return Trained(losses, load_file(await_handle(ranks.publish(), waiter="the benchmark").path))
    finally:
        ranks.close()


def quickstart_on_two_nodes(directory: Path, *overrides: str) -> dict[str, float]:
    """With a rank, a server and an environment worker on each: what `quickstart` measures with one of each in all."""
    learn = "learn: {roles: [actor], nodes: 2}"
    play = "play: {roles: [rollout, environment], nodes: 2, slots_per_node: 2}"
    words = [sys.executable, "-m", "penstock.cli.main", "train", str(EXAMPLE), f"runs_dir={directory}", *overrides]
    words += ["trainer.ranks=2", "rollout.servers=2", "env.workers=2", f"cluster.pools={{{learn}, {play}}}"]
    words += ["run_id=two"]
    with cluster(2) as address:
        started = time.monotonic()
        subprocess.run(
            [*words, "cluster.private=true", "--cluster", address],
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=LIMIT_S,
        )
        seconds = time.monotonic() - started
    summary = json.loads((directory / "two" / "summary.json").read_text())
    return {
        "quickstart_eval_before": summary["eval_before"],
        "quickstart_eval_after": summary["eval_after"],
        "quickstart_wall_s": seconds,
    }


def loss_difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest over the steps."""
    return float(np.abs(np.subtract(found, expected)).max() / np.abs(expected).max())


def weight_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all weights together."""
    norms = [((found[name] - weight).norm() ** 2, weight.norm() ** 2) for name, weight in expected.items()]
    apart, size = torch.tensor(norms).sum(dim=0).sqrt().tolist()
    return float(apart / size)


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    steps = 3 if options.quick else 10
    batch = make_batch(setting_on(torch.device("cpu")), 24, 0.8)
    figures = {}
    with TemporaryDirectory() as directory, patch.dict(os.environ, {RUNTIME_DIR: directory}):
        alone = train(1, "ddp", batch, steps, Path(directory) / "alone")
        for strategy in STRATEGIES:
            found = train(NUM_RANKS, strategy, batch, steps, Path(directory) / strategy)
            figures[f"two_rank_loss_difference_{strategy}"] = loss_difference(found.losses, alone.losses)
            figures[f"two_rank_weight_difference_{strategy}"] = weight_difference(found.weights, alone.weights)
    for key in DIFFERENCES:
        figures[key] = max(figures[f"{key}_{strategy}"] for strategy in STRATEGIES)
    with TemporaryDirectory() as directory:
        overrides = ["model.warm_start.steps=20", "trainer.steps=6", "data.eval_tasks=16"] if options.quick else []
        figures |= quickstart_on_two_nodes(Path(directory), *overrides)
    figures |= on_ray(rounds=3 if options.quick else 15)
    publish(BENCHMARK, figures, options.json)


if __name__ == "__main__":
    main()
