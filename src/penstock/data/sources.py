"""Task sources: the one service that all environments get their tasks from. It lives in the controller, and tasks
travel with the work.

`MixedTasks` numbers the tasks of all tags, by weight; `TaskStream` walks through them. Nothing but the position is to
be saved, and memory depends neither on how many tasks were taken nor on how many environments play.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile

from penstock.config import Config, ConfigError
from penstock.data.interleaving import Interleaving
from penstock.data.items import Items, open_items
from penstock.ports import TaskSource
from penstock.types import Purpose, Task


class MixedTasks:
    """`TaskSource` of one purpose, over all its tags."""

    def __init__(
        self,
        items: Mapping[str, Items],
        *,
        purpose: Purpose,
        weights: Mapping[str, int] | None = None,
        sizes: Mapping[str, int | None] | None = None,
    ) -> None:
        """`sizes`: items of each tag, unless it is as many as there are."""
        self._items, self._purpose = items, purpose
        self._order = Interleaving(
            weights or dict.fromkeys(items, 1), sizes or {tag: each.size for tag, each in items.items()}
        )
        self.size = self._order.size
        """None without end."""

    def task(self, index: int) -> Task | None:
        place = self._order.at(index)
        if place is None:
            return None
        tag, number = place
        name, payload = self._items[tag].item(number)
        return Task(task_id=name, tag=tag, index=index, purpose=self._purpose, payload=payload)


class FirstTasks:
    """The first tasks of a source."""

    def __init__(self, source: TaskSource, size: int) -> None:
        self._source, self._size = source, size

    def task(self, index: int) -> Task | None:
        return self._source.task(index) if index < self._size else None


class TaskStream:
    """Walks a source in order, skipping tasks whose `question` is held out. `position` is all there is to save."""

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


def question(task: Task) -> str:
    """What identifies the problem itself, whatever its number: its `question`. Empty for tasks that have none, which
    are held out by their numbers alone."""
    return str(task.payload.get("question", ""))


def open_tasks(config: Config, *, seed: int | None = None) -> MixedTasks:
    """What is trained on, of all tags by weight; with another `seed` than the run's, other tasks where they are drawn.
    Raises `ConfigError`."""
    seed = config.seed if seed is None else seed
    settings = config.environments.train
    items = {tag: open_items(each.data, seed=seed, purpose="train", tag=tag) for tag, each in settings.items()}
    return MixedTasks(items, purpose="train", weights={tag: each.weight for tag, each in settings.items()})


def held_out_tasks(config: Config) -> list[Task]:
    """What validation plays, always the same; never trained on. Raises `ConfigError`."""
    items: dict[str, Items] = {}
    sizes: dict[str, int | None] = {}
    for tag, settings in config.environments.eval.items():
        items[tag] = open_items(settings.data, seed=config.seed, purpose="eval", tag=tag)
        sizes[tag] = _num_held_out(config, settings.data.eval_tasks, items[tag].size)
    tasks = MixedTasks(items, purpose="eval", sizes=sizes)
    return [task for index in range(tasks.size or 0) if (task := tasks.task(index)) is not None]


def _num_held_out(config: Config, eval_tasks: int, size: int | None) -> int:
    """Of one tag."""
    wanted = eval_tasks if config.validation.tasks is None else config.validation.tasks
    if wanted >= 0:
        return wanted if size is None else min(wanted, size)
    assert size is not None, "the configuration refuses a whole of what has no end"
    return size
