"""Task sources: numbered, deterministic supplies of tasks, and a split that keeps held-out tasks out of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import ConfigError, DataConfig
from penstock.ports import TaskSource
from penstock.types import EVAL_TAG, Task, stable_seed

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


class JsonLinesSource:
    """Lines of a file, in order."""

    def __init__(self, path: Path, *, tag: str, part: slice = slice(None)) -> None:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"data: {path} cannot be read: {error.strerror}") from None
        self._lines = list(enumerate(lines, start=1))[part]
        if not self._lines:
            raise ConfigError(f"data: {path} has {len(lines)} lines, none of them of tag {tag}; lower data.eval_tasks")
        self._path, self._tag = path, tag

    def __len__(self) -> int:
        return len(self._lines)

    def task(self, index: int) -> Task | None:
        if index >= len(self._lines):
            return None
        number, line = self._lines[index]
        try:
            payload = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ConfigError(f"data: {self._path}, line {number}: not a JSON object: {error}") from None
        return Task(task_id=f"{self._path.stem}/{number}", tag=self._tag, index=index, payload=payload)


class SeedSource:
    """Tasks that are nothing but a number; the environment makes its world from the seed."""

    def __init__(self, *, tag: str) -> None:
        self._tag = tag

    def task(self, index: int) -> Task | None:
        return Task(task_id=f"seed/{self._tag}/{index}", tag=self._tag, index=index)


class FirstTasks:
    """The first tasks of a source."""

    def __init__(self, source: TaskSource, size: int) -> None:
        self._source, self._size = source, size

    def task(self, index: int) -> Task | None:
        return self._source.task(index) if index < self._size else None


class TaskStream:
    """Walks a source in order, skipping tasks whose question is held out. `position` is all there is to save."""

    max_skipped_in_a_row = 10_000

    def __init__(self, source: TaskSource, *, held_out: Iterable[Task] = (), position: int = 0) -> None:
        self._source, self.position = source, position
        self._held_out = {question(task) for task in held_out} - {""}

    def take(self, count: int) -> list[Task]:
        """The next `count` tasks; fewer once the source is used up."""
        tasks = (self.next() for _ in range(count))
        return [task for task in takewhile(lambda task: task is not None, tasks) if task is not None]

    def at(self, index: int) -> Task | None:
        """The task at `index`, whether taken or not."""
        return self._source.task(index)

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


def _json_lines(config: DataConfig, *, tag: str) -> JsonLinesSource:
    assert config.path is not None
    path, evaluating = Path(config.path), tag == EVAL_TAG
    if config.eval_path is not None:
        return JsonLinesSource(Path(config.eval_path) if evaluating else path, tag=tag)
    part = slice(-config.eval_tasks, None) if evaluating else slice(None, -config.eval_tasks or None)
    return JsonLinesSource(path, tag=tag, part=part)


def count_tasks(source: TaskSource) -> int | None:
    """How many there are; None if there is no end of them."""
    return len(source) if isinstance(source, Sized) else None


def question(task: Task) -> str:
    """What identifies the problem itself, whatever its number; empty for tasks made from seeds alone."""
    return str(task.payload.get("question", ""))


def open_source(config: DataConfig, *, seed: int, tag: str) -> TaskSource:
    """The source of `config` for one tag. Different tags draw different tasks."""
    makers: dict[str, Callable[[], TaskSource]] = {
        "reasoning_gym": lambda: ReasoningGymSource(
            config.dataset, config.options, seed=stable_seed(seed, tag) >> 32, tag=tag
        ),
        "jsonl": lambda: _json_lines(config, tag=tag),
        "seeds": lambda: SeedSource(tag=tag),
    }
    return makers[config.source]()
