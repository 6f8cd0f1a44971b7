"""What every objective makes of answers that several policy versions wrote.

The harness of `staleness`, with answers in parts: the weights move between two parts of an answer, as they do in a run
with `scheduler.segment_length`. Each step begins one batch, generates one more part of every batch in progress with the
newest weights, and trains the batch that this completes. So an answer in n parts has tokens of n versions, the oldest
n - 1 versions old. The task is the quickstart's: words of three or four letters, one token each, and an end.

First table: one part is on-policy training; then answers of two and of four versions. `ppo_newest` is the default
objective with `segments: newest`: tokens of earlier versions are context. Second table: four parts, but the weights
move only at every second one. There the newest version wrote two parts, and `last_part` trains only the last one, which
exists only here. Reward is that of answers sampled for held-out tasks, after training; `trained_share` is the share of
sampled tokens that were in the loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
from lab import EXAMPLE
from objective_lab import Lab, Outcome, Size, Stage, options, streams, with_objective
from report import Benchmark, Figures, publish

from penstock.config import load_config
from penstock.envs.dialogue import text_of
from penstock.samples import Sample, Segment
from penstock.types import Task

SEEDS = (1, 2, 3)
VERSIONS = (1, 2, 4)
VARIANTS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo"},
    "ppo_newest": {"name": "ppo", "segments": "newest"},
    "pois": {"name": "pois"},
    "decoupled_interpolated": {"name": "decoupled", "proximal": "interpolated"},
    "decoupled_snapshot": {"name": "decoupled", "proximal": "snapshot"},
    "tis": {"name": "tis"},
}
RECOMMENDED = "ppo"
LAST_PART = "last_part"
NEWEST_VERSION, HALVES = "ppo_newest", 2
"""Parts that the weights of one version write, in the second table."""
PARTS = max(VERSIONS)
TABLE = "Held-out reward after training on answers of n versions"
PARTS_TABLE = "Four parts of two versions"
BENCHMARK = Benchmark(
    name="mixed_versions",
    measures=["trainer", "rollout", "model"],
    figures=[
        *(f"{name}_n={versions}" for name in VARIANTS for versions in VERSIONS),
        *(f"{name}_{column}" for name in (NEWEST_VERSION, LAST_PART) for column in ("reward", "trained_share")),
        "recommended_reward_at_4_vs_1",
    ],
)


class Cell(NamedTuple):
    """One run."""

    variant: str
    parts: int
    parts_per_version: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.parts}-{self.parts_per_version}-{self.seed}"


@dataclass(slots=True)
class Answer:
    """An answer in progress."""

    prompt_ids: list[int]
    environment: Any
    bounds: list[int]
    """Tokens at which its parts end, but the last one."""
    segments: list[Segment] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return bool(self.segments) and self.segments[-1].finish_reason == "stop"

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]


@dataclass(slots=True)
class Batch:
    """Answers that are generated part by part, by task and member."""

    answers: dict[tuple[int, int], Answer]
    num_parts: int = 0

    @classmethod
    def of(cls, stage: Stage, tasks: Sequence[Task], parts: int) -> Batch:
        answers = {}
        for group, task in enumerate(tasks):
            word = task.payload["metadata"]["word"]
            length = len(word) + 1  # its letters and the end
            bounds = [-(-length * part // parts) for part in range(1, parts)]
            for member in range(stage.config.env.group_size):
                environment = stage.make(task)
                prompt_ids = stage.prompt(text_of(environment.reset(0)[0]))
                answers[group, member] = Answer(prompt_ids, environment, bounds)
        return cls(answers)

    def generate(self, stage: Stage, *, salt: str, last: bool) -> None:
        """Generate one more part of every answer that has not ended."""
        for (group, member), answer in self.answers.items():
            if not answer.has_ended:
                token_ids = answer.token_ids
                left = stage.config.env.max_new_tokens - len(token_ids)
                limit = left if last else answer.bounds[self.num_parts] - len(token_ids)
                part = f"{salt} part {self.num_parts}"
                stage.generate(f"{group}/{member}", answer.prompt_ids + token_ids, [limit], salt=part)
        for rid, segments in stage.generated():
            place, _, number = rid.partition("/")
            self.answers[int(place), int(number)].segments += segments
        self.num_parts += 1

    def samples(self, stage: Stage, *, only_last_part: bool) -> list[Sample]:
        samples = []
        for (group, member), answer in self.answers.items():
            sample = stage.sample(group, member, answer.prompt_ids, answer.segments, answer.environment)
            if only_last_part:
                before = len(sample.token_ids) - len(answer.segments[-1].token_ids)
                sample.loss_mask[:before] = 0
            samples.append(sample)
        return samples


def train(cell: Cell, policy: Path, size: Size) -> Outcome:
    """One run."""
    variant = VARIANTS["ppo" if cell.variant == LAST_PART else cell.variant]
    config = with_objective(load_config(EXAMPLE), variant, seed=cell.seed)
    stage = Stage(config, policy, max_staleness=cell.parts, seed=cell.seed)
    tasks, held_out = streams(config, cell.seed)
    batches: deque[tuple[int, Batch]] = deque()
    rewards: list[float] = []
    begun, shares = 0, []
    while len(rewards) < size.steps:
        batches.append((begun, Batch.of(stage, tasks.take(size.groups), cell.parts)))
        begun += 1
        stage.serve(*stage.weights())
        for number, batch in batches:
            for _ in range(cell.parts_per_version):
                batch.generate(stage, salt=f"train {number}", last=batch.num_parts == cell.parts - 1)
        if batches[0][1].num_parts == cell.parts:
            batch = batches.popleft()[1]
            samples = batch.samples(stage, only_last_part=cell.variant == LAST_PART)
            offered = sum(int(sample.loss_mask.sum()) for sample in samples)
            shares.append(offered / sum(len(answer.token_ids) for answer in batch.answers.values()))
            rewards.append(fmean(sample.reward for sample in samples))
            stage.step(samples)
    outcome = stage.outcome(policy, held_out[: size.held_out], rewards)
    return outcome._replace(trained_share=outcome.trained_share * fmean(shares))


def plot(found: dict[Cell, Outcome], file: Path) -> None:
    """Reward over versions of an answer, a line per objective, and the range over seeds."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for number, name in enumerate(VARIANTS):
        rewards = [
            [found[Cell(name, versions, 1, seed)].reward for seed in SEEDS if Cell(name, versions, 1, seed) in found]
            for versions in VERSIONS
        ]
        places = [place + 0.04 * (number - len(VARIANTS) / 2) for place in range(len(VERSIONS))]
        means = [fmean(values) for values in rewards]
        below, above = (
            [abs(end(values) - mean) for values, mean in zip(rewards, means, strict=True)] for end in (min, max)
        )
        width = 2.5 if name == RECOMMENDED else 1.2
        axes.errorbar(places, means, yerr=[below, above], marker="o", capsize=3, label=name, linewidth=width)
    axes.set_xticks(range(len(VERSIONS)), [str(versions) for versions in VERSIONS])
    axes.set(xlabel="policy versions that wrote an answer", ylabel="held-out reward after training")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    given = options(__doc__, BENCHMARK.name)
    seeds = SEEDS[:1] if given.quick else SEEDS
    lab = Lab(load_config(EXAMPLE), train, given)
    cells = [Cell(name, versions, 1, seed) for seed in seeds for name in VARIANTS for versions in VERSIONS]
    halves = [Cell(name, PARTS, HALVES, seed) for seed in seeds for name in (NEWEST_VERSION, LAST_PART)]
    found = lab.all([*cells, *halves])
    figures = Figures()
    for name in VARIANTS:
        for versions in VERSIONS:
            mine = [found[Cell(name, versions, 1, seed)] for seed in seeds]
            figures.cell(TABLE, name, f"n={versions}", (outcome.reward for outcome in mine))
    for name in (NEWEST_VERSION, LAST_PART):
        mine = [found[Cell(name, PARTS, HALVES, seed)] for seed in seeds]
        figures.cell(PARTS_TABLE, name, "reward", (outcome.reward for outcome in mine))
        figures.cell(PARTS_TABLE, name, "trained_share", (outcome.trained_share for outcome in mine))
    on_policy, mixed = figures.flat[f"{RECOMMENDED}_n=1"], figures.flat[f"{RECOMMENDED}_n={PARTS}"]
    figures.add("recommended_reward_at_4_vs_1", [mixed / on_policy if on_policy else None])
    publish(BENCHMARK, figures.flat, given.json, tables=figures.tables, seeds=seeds)
    if given.plot:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
