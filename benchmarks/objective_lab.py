"""A harness that trains on data of chosen versions: what `staleness` and `mixed_versions` share.

Policy and engine are in one process, so it is exact which weights generate what. The policy is the quickstart's, warm
started once for all runs of a benchmark.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from report import runs_dir

from penstock.config import Config
from penstock.data.sources import TaskStream, held_out_tasks, open_tasks
from penstock.envs.demonstrations import demonstrations
from penstock.envs.dialogue import text_of
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
from penstock.trainer.prepare import prepare
from penstock.trainer.warm_start import Imitation, warm_start
from penstock.types import EpisodeId, Task

LEARNING_RATE = 5e-4
"""The quickstart's. Three times this rate costs even on-policy training a quarter of its reward."""


class Size(NamedTuple):
    """How much a run does."""

    steps: int
    groups: int
    held_out: int
    """Tasks that are played after training, the first ones."""
    warm_start: int | None = None
    """Steps of the warm start; None: as many as the quickstart's."""


FULL, QUICK = Size(steps=120, groups=16, held_out=100_000), Size(steps=2, groups=2, held_out=8, warm_start=5)


class Outcome(NamedTuple):
    """What a run came to."""

    reward: float
    """Held out, after training."""
    best: float
    """Mean training reward of the best tenth of the run, in a row."""
    ess: float
    clip_fraction: float
    trained_share: float
    """Of the tokens of the samples that were trained on, those in the loss."""
    seconds: float


class Stage:
    """A task, a policy that learns it, and an engine that serves the weights that it is given."""

    def __init__(self, config: Config, policy: Path, *, max_staleness: int, seed: int) -> None:
        self.config, self._seed = config, seed
        self.make, self._chat = environment_maker(config.env), ChatTokenizer.load(policy)
        self.learner = Learner(
            load_policy(policy, weights=True),
            config.trainer,
            max_staleness=max_staleness,
            max_tokens=SegmentPolicy.from_config(config, config.env).max_episode_tokens,
            whole_step=config.trainer.groups_per_step * config.env.group_size,
        )
        served = load_policy(policy, weights=True)
        self._engine = SlotEngine(served, num_slots=256, max_context=config.model.max_context, policy_version=0)
        self._states: list[dict[str, float]] = []

    def weights(self) -> tuple[int, dict[str, torch.Tensor]]:
        """Return a copy of the learner's weights, and their version."""
        named = self.learner.named_weights()
        return self.learner.policy_version, {name: tensor.clone() for name, tensor in named.items()}

    def serve(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Generate with these weights from now on."""
        if version > self._engine.policy_version:
            self._engine.load_weights(weights, version)

    def prompt(self, observation: str) -> list[int]:
        return self._chat.prompt([{"role": "user", "content": observation}])

    def generate(self, rid: str, prompt_ids: list[int], max_new_tokens: Sequence[int], *, salt: str) -> None:
        """Ask for as many samples as `max_new_tokens` has limits. `salt` tells apart requests of the same `rid`."""
        seeds = tuple(stable_seed(self._seed, salt, rid, member) for member in range(len(max_new_tokens)))
        limits, params = tuple(max_new_tokens), SamplingParams()
        self._engine.submit(
            GenerateRequest(rid=rid, prompt_ids=prompt_ids, params=params, max_new_tokens=limits, seeds=seeds)
        )

    def generated(self) -> Iterator[tuple[str, list[Segment]]]:
        """Yield what was asked for, at temperature 1."""
        while self._engine.has_work:
            for done in self._engine.step():
                yield done.request.rid, list(done.segments)

    def play(self, tasks: Sequence[Task], *, group_size: int, salt: str) -> list[Sample]:
        """Every task `group_size` times, each answer by the same weights."""
        environments = {str(number): self.make(task) for number, task in enumerate(tasks)}
        prompts = {rid: self.prompt(text_of(environment.reset(0)[0])) for rid, environment in environments.items()}
        for rid, prompt_ids in prompts.items():
            self.generate(rid, prompt_ids, [self.config.env.max_new_tokens] * group_size, salt=salt)
        samples = [
            self.sample(int(rid), member, prompts[rid], [segment], environments[rid])
            for rid, segments in self.generated()
            for member, segment in enumerate(segments)
        ]
        return sorted(samples, key=lambda sample: (sample.group, sample.episode))

    def sample(
        self, group: int, member: int, prompt_ids: list[int], segments: Sequence[Segment], environment: Any
    ) -> Sample:
        """Return the rewarded sample of an answer in segments."""
        answer = [token for segment in segments for token in segment.token_ids]
        whole = segments[-1].finish_reason == "stop"
        _, reward, *_ = environment.step(self._chat.decode(answer)) if whole else ("", 0.0)
        return Trajectory(
            episode=EpisodeId("play", group, member, 0),
            task_id="",
            turns=[Turn(observation_ids=prompt_ids, segments=list(segments))],
            reward=reward,
            status="completed" if whole else "truncated",
        ).flatten()

    def step(self, samples: Sequence[Sample]) -> None:
        """Train on these samples, without groups in which all rewards are equal."""
        batch, _ = prepare(list(differing(samples)) or samples, settings=self.config.trainer.advantages)
        self.learner.accumulate(batch)
        self._states.append(dict(self.learner.step().metrics))

    def outcome(self, policy: Path, held_out: Sequence[Task], rewards: Sequence[float]) -> Outcome:
        """Play held-out tasks with the trained weights. `rewards`: means of the training steps."""
        final = Stage(self.config, policy, max_staleness=0, seed=self._seed)
        final.learner.load_state_dict(self.learner.state_dict())
        final.serve(*final.weights())
        played = final.play(held_out, group_size=4, salt="evaluation")
        tenth = max(len(rewards) // 10, 1)
        masked = ("tokens_masked_stale", "tokens_masked_foreign", "tokens_masked_segments")
        trained = sum(state["tokens"] for state in self._states)
        return Outcome(
            reward=fmean(sample.reward for sample in played),
            best=max(fmean(rewards[start : start + tenth]) for start in range(len(rewards) - tenth + 1)),
            ess=fmean(state["ess"] for state in self._states),
            clip_fraction=fmean(state["clip_fraction"] for state in self._states),
            trained_share=trained / (trained + sum(state[name] for state in self._states for name in masked)),
            seconds=0.0,
        )


def differing(samples: Sequence[Sample]) -> Iterator[Sample]:
    """Yield samples of groups in which not all rewards are equal."""
    for _, group in itertools.groupby(samples, key=lambda sample: sample.group):
        members = list(group)
        if len({member.reward for member in members}) > 1:
            yield from members


def with_objective(config: Config, objective: dict[str, Any], *, seed: int) -> Config:
    overrides = {"learning_rate": LEARNING_RATE, "objective": objective}
    trainer = config.trainer.model_validate(config.trainer.model_dump(exclude={"objective"}) | overrides)
    return config.model_copy(update={"trainer": trainer, "seed": seed})


def streams(config: Config, seed: int) -> tuple[TaskStream, list[Task]]:
    """Tasks to train on, and held-out ones."""
    held_out = held_out_tasks(config.model_copy(update={"seed": 0}))
    return TaskStream(open_tasks(config, seed=seed), held_out=held_out), held_out


def warm_policy(config: Config, runs: Path, steps: int | None) -> Path:
    """The warm-started policy of a benchmark, the same for all its runs."""
    directory = runs / "policy"
    if (directory / "model.safetensors").exists():
        return directory
    write_tiny_model(directory, config.model.tiny, config.model.max_context)
    model = load_policy(directory, weights=False, seed=0)
    tasks, _ = streams(config, seed=1)

    def examples() -> Iterator[tuple[list[int], list[int]]]:
        return demonstrations(
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


class Named(Protocol):
    """What a run is made for."""

    @property
    def name(self) -> str: ...


Cell = TypeVar("Cell", bound=Named)


class Lab(Generic[Cell]):
    """Runs cells, some at a time, and keeps what they came to."""

    def __init__(
        self, config: Config, train: Callable[[Cell, Path, Size], Outcome], options: argparse.Namespace
    ) -> None:
        """`train`: a function of a module, which is called in processes."""
        self._config, self._train, self._processes = config, train, options.processes
        self._runs, self._size = runs_dir(options.runs, quick=options.quick), QUICK if options.quick else FULL
        self._runs.mkdir(parents=True, exist_ok=True)

    def all(self, cells: Sequence[Cell]) -> dict[Cell, Outcome]:
        """Return the outcome of every cell; finished ones are not repeated."""
        policy = warm_policy(self._config, self._runs, self._size.warm_start)
        missing = [cell for cell in cells if not self._file(cell).exists()]
        with ProcessPoolExecutor(self._processes) as pool:
            futures = {cell: pool.submit(_timed, self._train, cell, policy, self._size) for cell in missing}
            for cell, future in futures.items():
                outcome = future.result()
                self._file(cell).write_text(json.dumps(outcome._asdict()))
                print(f"{cell.name}: reward {outcome.reward:.3f}, {outcome.seconds:.0f} s", file=sys.stderr, flush=True)
        return {cell: Outcome(**json.loads(self._file(cell).read_text())) for cell in cells}

    def _file(self, cell: Cell) -> Path:
        return self._runs / f"{cell.name}-{self._size.steps}-steps.json"


def options(description: str | None, name: str) -> argparse.Namespace:
    """Return the options of a benchmark of objectives: those of all benchmarks, and what its lab needs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rewards there")
    parser.add_argument("--quick", action="store_true", help="a few small steps, no repetition")
    parser.add_argument("--runs", type=Path, default=Path("runs") / name, help="where finished runs are kept")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    return parser.parse_args()


def _timed(train: Callable[[Cell, Path, Size], Outcome], cell: Cell, policy: Path, size: Size) -> Outcome:
    torch.set_num_threads(1)
    started = time.monotonic()
    return train(cell, policy, size)._replace(seconds=time.monotonic() - started)
