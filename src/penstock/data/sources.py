"""Task sources: numbered, deterministic supplies of tasks, and a split that keeps held-out tasks out of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock.config import ConfigError, DataConfig
from penstock.ports import TaskSource
from penstock.types import Task, stable_seed

_ENDLESS = 2**31 - 1


class ReasoningGymSource:
    """A procedural dataset of reasoning-gym (github.com/open-thought/reasoning-gym), without end."""

    def __init__(self, dataset: str, options: dict[str, Any], *, seed: int, tag: str) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise ConfigError(
                "data.source reasoning_gym needs the package reasoning-gym: pip install 'penstock[tasks]'"
            ) from None
        try:
            self._dataset = reasoning_gym.create_dataset(dataset, seed=seed, size=_ENDLESS, **options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"data.dataset {dataset} with options {options}: {error}") from None
        self._name, self._tag = dataset, tag

    def task(self, index: int) -> Task | None:
        entry = self._dataset[index]
        return Task(task_id=f"{self._name}/{self._tag}/{index}", tag=self._tag, index=index, payload=entry)


class SeedSource:
    """Tasks that are nothing but a number; the environment makes its world from the seed."""

    def __init__(self, *, tag: str) -> None:
        self._tag = tag

    def task(self, index: int) -> Task | None:
        return Task(task_id=f"seed/{self._tag}/{index}", tag=self._tag, index=index)


class TaskStream:
    """Walks a source in order, skipping tasks whose question is held out. `position` is all there is to save."""

    max_skipped_in_a_row = 10_000

    def __init__(self, source: TaskSource, *, held_out: Iterable[Task] = (), position: int = 0) -> None:
        self._source, self.position = source, position
        self._held_out = {question(task) for task in held_out} - {""}

    def next(self) -> Task | None:
        """The next task to train on; None once the source is used up."""
        for _ in range(self.max_skipped_in_a_row):
            task = self._source.task(self.position)
            self.position += 1
            if task is None or question(task) not in self._held_out:
                return task
        raise ConfigError(
            f"data: {self.max_skipped_in_a_row} tasks in a row are held out for evaluation; "
            "the dataset is too small for data.eval_tasks"
        )


def question(task: Task) -> str:
    """What identifies the problem itself, whatever its number; empty for tasks made from seeds alone."""
    return str(task.payload.get("question", ""))


def open_source(config: DataConfig, *, seed: int, tag: str) -> TaskSource:
    """The source of `config` for one tag. Different tags draw different tasks."""
    makers: dict[str, Callable[[], TaskSource]] = {
        "reasoning_gym": lambda: ReasoningGymSource(
            config.dataset, config.options, seed=stable_seed(seed, tag) >> 32, tag=tag
        ),
        "seeds": lambda: SeedSource(tag=tag),
    }
    return makers[config.source]()
