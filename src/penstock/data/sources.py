"""Task sources: the one place from which all environments get their tasks. The controller owns the source and sends
each task along with the rollout request.

`MixedTasks` numbers the tasks of all tags, interleaved by weight. `TaskStream` walks through them in order. A
checkpoint saves only the position. Memory use depends neither on the number of tasks taken nor on the number of
environments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from penstock.config import Config, ConfigError
from penstock.data.interleaving import Interleaving
from penstock.data.items import Items, RowError, open_items
from penstock.ports.environment import TaskSource
from penstock.types import Purpose, Task

LOOKED_AT, FEWEST = 512, 32
"""Number of a stream's first tasks by which it is judged whether enough are left to train on, and how many a tag must
have among them."""
MANY_HELD_OUT, MOST_HELD_OUT = 0.5, 0.9
"""Shares of them that are held out, above which there is a warning, and above which there is too little to train on."""


class MixedTasks:
    """A `TaskSource` over all tags of one purpose."""

    def __init__(
        self,
        items: Mapping[str, Items],
        *,
        purpose: Purpose,
        weights: Mapping[str, int] | None = None,
        sizes: Mapping[str, int | None] | None = None,
    ) -> None:
        """`sizes`: the number of items to use of each tag. Default: all items of the tag."""
        self._items, self._purpose = items, purpose
        sizes = sizes or {tag: each.size for tag, each in items.items()}
        self._order = Interleaving(weights or dict.fromkeys(items, 1), sizes)
        self.size = self._order.size
        """Number of tasks; None if endless."""

    def task(self, index: int) -> Task | None:
        place = self._order.at(index)
        if place is None:
            return None
        tag, number = place
        try:
            name, payload = self._items[tag].item(number)
        except RowError as error:
            error.tag = tag
            raise
        return Task(task_id=name, tag=tag, index=index, purpose=self._purpose, payload=payload)


class FirstTasks:
    """The first `size` tasks of another source."""

    def __init__(self, source: TaskSource, size: int) -> None:
        self._source, self._size = source, size

    def task(self, index: int) -> Task | None:
        return self._source.task(index) if index < self._size else None


class TaskStream:
    """An iterator over a source that skips tasks with a held-out `question`, and rows that cannot be played. `position`
    is its whole state."""

    max_skipped_in_a_row = 10_000
    max_unusable_in_a_row = 20
    """Most consecutive rows of a tag that cannot be played. More of them show that the data do not fit at all."""

    def __init__(
        self,
        source: TaskSource,
        *,
        held_out: Iterable[Task] = (),
        position: int = 0,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        """`warn` is told about each tag of which many tasks are held out, and about rows that cannot be played."""
        self._source, self.position = source, position
        self._unusable: dict[str, list[RowError]] = {}
        """By tag: errors since the latest row that can be played."""
        self._num_unusable, self._is_first = 0, True
        self._held_out = {question(task) for task in held_out} - {""}
        self._warn, self._num_looked_at = warn, 0
        self._first: dict[str, Counter[str]] = {}
        """By tag: how often each question came among the first tasks, until these are judged."""

    def take(self, count: int) -> list[Task]:
        """Return the next `count` tasks, or fewer once the source is used up."""
        return list(islice(iter(self.next, None), count))

    def at(self, index: int) -> Task | None:
        """Return the task at `index`, whether it was taken or not."""
        return self._source.task(index)

    def next(self) -> Task | None:
        """Return the next task to train on; None once the source is used up.

        Raises `ConfigError` if `max_skipped_in_a_row` tasks in a row are held out, or nearly all of the first ones, and
        if all rows, or `max_unusable_in_a_row` of one tag, cannot be played.
        """
        for _ in range(self.max_skipped_in_a_row):
            try:
                task = self._source.task(self.position)
            except RowError as error:
                self.position += 1
                self._leave_out(error)
                continue
            if task is None and self._is_first and self._unusable:
                raise next(iter(self._unusable.values()))[0]
            self.position += 1
            self._is_first = False
            if task is not None:
                self._unusable.pop(task.tag, None)
            if task is not None and self._held_out and self._num_looked_at < LOOKED_AT:
                self._look_at(task)
            if task is None or question(task) not in self._held_out:
                return task
        raise ConfigError(
            f"data: {self.max_skipped_in_a_row} tasks in a row are held out for evaluation; "
            "the dataset is too small for data.eval_tasks"
        )

    def _leave_out(self, error: RowError) -> None:
        """Count a row that cannot be played. Warn about the first, the tenth, the hundredth, and so on."""
        errors = self._unusable.setdefault(error.tag, [])
        errors.append(error)
        if len(errors) == self.max_unusable_in_a_row:
            raise errors[0]
        self._num_unusable += 1
        if self._warn is not None and str(self._num_unusable).strip("0") == "1":
            self._warn(f"left out {self._num_unusable} of the first {self.position} rows; the latest is {error}")

    def _look_at(self, task: Task) -> None:
        """Count one of the first tasks, and judge all tags after the last of them."""
        self._num_looked_at += 1
        self._first.setdefault(task.tag, Counter())[question(task)] += 1
        if self._num_looked_at == LOOKED_AT:
            for tag, asked in self._first.items():
                if asked.total() >= FEWEST:
                    self._judge(tag, asked)
            self._first.clear()

    def _judge(self, tag: str, asked: Counter[str]) -> None:
        skipped = {each: count for each, count in asked.items() if each in self._held_out}
        share = sum(skipped.values()) / asked.total()
        found = (
            f"data: {share:.0%} of the first {asked.total()} tasks of {tag} are held out for evaluation, and not "
            f"trained. They are {len(asked)} distinct tasks, of which {len(skipped)} are held out: the dataset is too "
            "small for data.eval_tasks; lower it, or use more data"
        )
        if share > MOST_HELD_OUT:
            raise ConfigError(found)
        if share > MANY_HELD_OUT and self._warn is not None:
            self._warn(found)


def question(task: Task) -> str:
    """Return the task's `question`, which identifies the problem independently of the task's number.

    It is empty for a task without one; such tasks are held out by their numbers alone.
    """
    value = task.payload.get("question")
    return "" if value is None else str(value)


def open_tasks(config: Config, *, seed: int | None = None) -> MixedTasks:
    """Return the training tasks of all tags, interleaved by weight. Raises `ConfigError`.

    `seed` replaces the run's seed: sources that draw tasks at random then give other tasks.
    """
    seed = config.seed if seed is None else seed
    settings = config.environments.train
    items = {tag: open_items(each.data, seed=seed, purpose="train", tag=tag) for tag, each in settings.items()}
    return MixedTasks(items, purpose="train", weights={tag: each.weight for tag, each in settings.items()})


def held_out_tasks(config: Config) -> list[Task]:
    """Return the validation tasks: always the same, and never trained on. Raises `ConfigError`."""
    items: dict[str, Items] = {}
    sizes: dict[str, int | None] = {}
    for tag, settings in config.environments.eval.items():
        items[tag] = open_items(settings.data, seed=config.seed, purpose="eval", tag=tag)
        sizes[tag] = _num_held_out(config, settings.data.eval_tasks, items[tag].size)
    tasks = MixedTasks(items, purpose="eval", sizes=sizes)
    return [task for index in range(tasks.size or 0) if (task := tasks.task(index)) is not None]


def _num_held_out(config: Config, eval_tasks: int, size: int | None) -> int:
    """Return the number of validation tasks of one tag."""
    wanted = eval_tasks if config.validation.tasks is None else config.validation.tasks
    if wanted >= 0:
        return wanted if size is None else min(wanted, size)
    assert size is not None, "the configuration refuses all items of an endless source"
    return size
