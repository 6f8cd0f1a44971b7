"""What every objective makes of data that are exactly k versions old.

A deterministic-lag harness: policy and engine in one process, the engine always serves the weights of k optimizer steps
ago, and everything it generates is trained at once. The quickstart's task and learning rate from one warm-started
policy; three times that rate costs even on-policy training a quarter of its reward. First every objective at every lag
with one seed; then the three best at lag 8, the recommended, the default and the naive one, with three others, which
alone are shown of these. `pois` is not here: where one version makes a whole answer, it is `reinforce`. Reward is that
of answers sampled for held-out tasks, after training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
import torch
from lab import EXAMPLE
from report import Benchmark, Figures, publish, runs_dir

from penstock.config import Config, load_config
from penstock.data.sources import TaskStream, held_out_tasks, open_tasks
from penstock.envs.demonstrations import demonstrations
from penstock.envs.registry import environment_maker
from penstock.model.chat import ChatTokenizer
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.slot_engine import SlotEngine
from penstock.samples import Sample, Segment, Trajectory, Turn
from penstock.scheduler.segments import SegmentPolicy
from penstock.seeding import stable_seed
from penstock.trainer.learner import Learner
from penstock.trainer.losses.objective import OBJECTIVES
from penstock.trainer.prepare import prepare
from penstock.trainer.warm_start import Imitation, warm_start
from penstock.types import EpisodeId, Task

LAGS, SCREENED, SEEDS = (0, 1, 2, 4, 8, 16), 0, (1, 2, 3)
LEARNING_RATE = 5e-4
NAIVE, DEFAULT, RECOMMENDED = "reinforce", "ppo", "decoupled_snapshot"
"""The default is for the default `scheduler.max_staleness` of 2, the recommended one for much staler data."""
VARIANTS: dict[str, dict[str, Any]] = {name: {"name": name} for name in OBJECTIVES if name != "pois"} | {
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


class Size(NamedTuple):
    """How much a run does."""

    steps: int
    groups: int
    held_out: int
    """Tasks that are played after training, the first ones."""
    warm_start: int | None = None
    """Steps of the warm start; None: as many as the quickstart's."""


FULL, QUICK = Size(steps=120, groups=16, held_out=100_000), Size(steps=2, groups=2, held_out=8, warm_start=5)


class Cell(NamedTuple):
    """One run."""

    objective: str
    lag: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.objective}-{self.lag}-{self.seed}"


class Outcome(NamedTuple):
    """What it came to."""

    reward: float
    """Held out, after training."""
    best: float
    """Mean training reward of the best tenth of the run, in a row."""
    ess: float
    clip_fraction: float
    seconds: float


class Stage:
    """The quickstart's task, a policy that learns it, and an engine that lags behind."""

    def __init__(self, config: Config, policy: Path, *, lag: int, seed: int) -> None:
        self._config, self._seed, self._lag = config, seed, lag
        self._make = environment_maker(config.env)
        self._chat = ChatTokenizer.load(policy)
        self.learner = Learner(
            load_policy(policy, weights=True),
            config.trainer,
            max_staleness=lag,
            max_tokens=SegmentPolicy.from_config(config, config.env).max_episode_tokens,
            whole_step=config.trainer.groups_per_step * config.env.group_size,
        )
        served = load_policy(policy, weights=True)
        self._engine = SlotEngine(served, num_slots=256, max_context=config.model.max_context, policy_version=0)
        self._past: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=lag + 1)

    def serve(self) -> None:
        """The weights of `lag` versions ago; the first ones while there are none so old."""
        weights = {name: tensor.clone() for name, tensor in self.learner.named_weights().items()}
        self._past.append((self.learner.policy_version, weights))
        version, oldest = self._past[0]
        if version > self._engine.policy_version:
            self._engine.load_weights(oldest, version)

    def play(self, tasks: Sequence[Task], *, group_size: int, salt: str) -> list[Sample]:
        """Every task `group_size` times, sampled at temperature 1."""
        environments = {str(number): self._make(task) for number, task in enumerate(tasks)}
        prompts = {}
        for rid, environment in environments.items():
            observation, _ = environment.reset(0)
            prompts[rid] = self._chat.prompt([{"role": "user", "content": observation}])
            seeds = tuple(stable_seed(self._seed, salt, rid, member) for member in range(group_size))
            request = GenerateRequest(
                rid=rid,
                prompt_ids=prompts[rid],
                params=SamplingParams(),
                max_new_tokens=(self._config.env.max_new_tokens,) * group_size,
                seeds=seeds,
            )
            self._engine.submit(request)
        samples = []
        while self._engine.has_work:
            for done in self._engine.step():
                rid = done.request.rid
                for member, segment in enumerate(done.segments):
                    samples.append(self._sample(int(rid), member, prompts[rid], segment, environments[rid]))
        return sorted(samples, key=lambda sample: (sample.group, sample.episode))

    def _sample(self, group: int, member: int, prompt: list[int], segment: Segment, environment: Any) -> Sample:
        whole = segment.finish_reason == "stop"
        _, reward, *_ = environment.step(self._chat.decode(segment.token_ids)) if whole else ("", 0.0)
        return Trajectory(
            episode=EpisodeId("play", group, member, 0),
            task_id="",
            turns=[Turn(observation_ids=prompt, segments=[segment])],
            reward=reward,
            status="completed" if whole else "truncated",
        ).flatten()


def train(cell: Cell, policy: Path, size: Size) -> Outcome:
    """One run, in a process of its own."""
    torch.set_num_threads(1)
    started = time.monotonic()
    config = configured(cell)
    stage = Stage(config, policy, lag=cell.lag, seed=cell.seed)
    tasks, held_out = streams(config, cell.seed)
    rewards, states = [], []
    for step in range(size.steps):
        stage.serve()
        samples = stage.play(tasks.take(size.groups), group_size=config.env.group_size, salt=f"train {step}")
        rewards.append(fmean(sample.reward for sample in samples))
        batch, _ = prepare(list(differing(samples)) or samples, normalize=config.trainer.normalize_advantages)
        stage.learner.accumulate(batch)
        states.append(stage.learner.step().metrics)
    final = Stage(config, policy, lag=0, seed=cell.seed)
    final.learner.load_state_dict(stage.learner.state_dict())
    final.serve()
    reward = fmean(sample.reward for sample in final.play(held_out[: size.held_out], group_size=4, salt="evaluation"))
    tenth = max(size.steps // 10, 1)
    return Outcome(
        reward=reward,
        best=max(fmean(rewards[start : start + tenth]) for start in range(size.steps - tenth + 1)),
        ess=fmean(state["ess"] for state in states),
        clip_fraction=fmean(state["clip_fraction"] for state in states),
        seconds=time.monotonic() - started,
    )


def differing(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Those of groups in which not all rewards are equal."""
    for _, group in itertools.groupby(samples, key=lambda sample: sample.group):
        members = list(group)
        if len({member.reward for member in members}) > 1:
            yield from members


def configured(cell: Cell) -> Config:
    overrides = {"trainer": {"learning_rate": LEARNING_RATE, "objective": VARIANTS[cell.objective]}}
    config = load_config(EXAMPLE)
    trainer = config.trainer.model_validate(config.trainer.model_dump(exclude={"objective"}) | overrides["trainer"])
    return config.model_copy(update={"trainer": trainer, "seed": cell.seed})


def streams(config: Config, seed: int) -> tuple[TaskStream, list[Task]]:
    """Tasks to train on, and held-out ones."""
    held_out = held_out_tasks(config.model_copy(update={"seed": 0}))
    return TaskStream(open_tasks(config, seed=seed), held_out=held_out), held_out


def warm_policy(runs: Path, steps: int | None) -> Path:
    """The quickstart's warm-started policy, the same for all."""
    directory = runs / "policy"
    if (directory / "model.safetensors").exists():
        return directory
    config = load_config(EXAMPLE)
    write_tiny_model(directory, config.model.tiny, config.model.max_context)
    model = load_policy(directory, weights=False, seed=0)
    tasks, _ = streams(config, seed=1)
    examples = demonstrations(
        tasks.next,
        make=environment_maker(config.env),
        max_turns=lambda task: config.env.max_turns,
        chat=ChatTokenizer.load(directory),
        seed=config.seed,
    )
    settings = config.model.warm_start
    warm_start(
        Imitation(model).step,
        examples,
        steps=settings.steps if steps is None else steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
    )
    model.save_pretrained(directory)
    return directory


class Lab:
    """Runs cells, two at a time, and keeps what they came to."""

    def __init__(self, runs: Path, size: Size, processes: int) -> None:
        self._runs, self._size, self._processes = runs, size, processes
        runs.mkdir(parents=True, exist_ok=True)

    def all(self, cells: Sequence[Cell]) -> dict[Cell, Outcome]:
        """Of every cell; finished ones are not repeated."""
        policy = warm_policy(self._runs, self._size.warm_start)
        missing = [cell for cell in cells if not self._file(cell).exists()]
        with ProcessPoolExecutor(self._processes) as pool:
            futures = {cell: pool.submit(train, cell, policy, self._size) for cell in missing}
            for cell, future in futures.items():
                outcome = future.result()
                self._file(cell).write_text(json.dumps(outcome._asdict()))
                print(f"{cell.name}: reward {outcome.reward:.3f}, {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
        return {cell: Outcome(**json.loads(self._file(cell).read_text())) for cell in cells}

    def _file(self, cell: Cell) -> Path:
        return self._runs / f"{cell.name}-{self._size.steps}-steps.json"


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw reward over lag there")
    parser.add_argument("--quick", action="store_true", help="a few small steps, no repetition")
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness"), help="where finished runs are kept")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    lab = Lab(runs_dir(options.runs, quick=options.quick), QUICK if options.quick else FULL, options.processes)
    found = lab.all([Cell(name, lag, SCREENED) for name in VARIANTS for lag in LAGS])
    ranked = sorted(VARIANTS, key=lambda name: found[Cell(name, 8, SCREENED)].reward, reverse=True)
    finalists = list(dict.fromkeys([*ranked[:3], RECOMMENDED, DEFAULT, NAIVE]))
    if not options.quick:
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
    publish(BENCHMARK, figures.flat, options.json, tables=figures.tables, seeds=SEEDS)
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
