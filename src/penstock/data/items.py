"""What a tag's tasks are made of: numbered items of a procedural dataset, of rows, or of seeds alone."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from penstock.config import ConfigError, DataConfig
from penstock.data.permutation import permuted
from penstock.data.tables import Row, Table, open_table
from penstock.types import Purpose, stable_seed

_ENDLESS = 2**31 - 1

Item = tuple[str, Row]
"""Name and payload."""


class NothingLeft(ConfigError):
    """All rows are held out, or none can be."""


class Items(Protocol):
    """Numbered items, with or without end."""

    size: int | None
    """How many; None without end."""

    def item(self, number: int) -> Item:
        """A pure function of `number`, below `size`."""
        ...


class ReasoningGym:
    """A procedural dataset of reasoning-gym (github.com/open-thought/reasoning-gym), without end."""

    size: int | None = None

    def __init__(self, dataset: str, options: dict[str, Any], *, seed: int, name: str) -> None:
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
        self._name = f"{dataset}/{name}"

    def item(self, number: int) -> Item:
        return f"{self._name}/{number}", self._dataset[number]


class Seeds:
    """Nothing but a number; the environment makes its world from the seed."""

    size: int | None = None

    def __init__(self, *, name: str) -> None:
        self._name = f"seed/{name}"

    def item(self, number: int) -> Item:
        return f"{self._name}/{number}", {}


class Rows:
    """Rows of a table from `start` to `stop`, in their order or shuffled, for so many epochs (None: without end)."""

    def __init__(
        self, table: Table, *, start: int, stop: int, epochs: int | None, shuffle_seed: int | None, keys: list[str]
    ) -> None:
        self._table, self._keys = table, keys
        self._start, self._num_rows = start, stop - start
        self._shuffle_seed = shuffle_seed
        """None keeps them in their order."""
        self._bounds: list[int] = (np.unique(np.clip(np.cumsum([0, *table.blocks]), start, stop)) - start).tolist()
        """Of the table's blocks within these rows."""
        self._blocks = lru_cache(2)(self._shuffled_blocks)
        self.size = None if epochs is None else epochs * self._num_rows

    def item(self, number: int) -> Item:
        epoch, place = divmod(number, self._num_rows)
        found = self._start + (place if self._shuffle_seed is None else self._shuffled(epoch, place))
        row = self._table.row(found)
        if any(key not in row for key in self._keys):
            lacking = ", ".join(key for key in self._keys if key not in row)
            raise ConfigError(f"data: {self._table.where(found)}: has no {lacking}; it has {', '.join(row)}")
        return f"{self._table.name}/{found + 1}", row

    def _shuffled(self, epoch: int, place: int) -> int:
        """The row at `place` of the order of `epoch`: blocks in one order, the rows of each in another, so that what is
        cheap to read together is read together."""
        order, ends = self._blocks(epoch)
        at = bisect_right(ends, place)
        block = order[at]
        start, stop = self._bounds[block], self._bounds[block + 1]
        within = place - (ends[at] - (stop - start))
        return start + permuted(within, stop - start, seed=stable_seed(self._shuffle_seed, epoch, block))

    def _shuffled_blocks(self, epoch: int) -> tuple[list[int], list[int]]:
        """The blocks in the order of `epoch`, and how many rows have been taken after each."""
        num_blocks, seed = len(self._bounds) - 1, stable_seed(self._shuffle_seed, epoch)
        order = [permuted(number, num_blocks, seed=seed) for number in range(num_blocks)]
        return order, np.cumsum(np.diff(self._bounds)[order]).tolist()


def open_items(data: DataConfig, *, seed: int, purpose: Purpose, tag: str) -> Items:
    """The items of `data` for one tag. Those for training and those that are held out differ."""
    if data.source == "reasoning_gym":
        own_seed = stable_seed(seed, purpose, tag) >> 32
        return ReasoningGym(data.dataset, data.options, seed=own_seed, name=purpose)
    if data.source == "seeds":
        return Seeds(name=f"{tag}/{purpose}")
    return _rows(data, seed=seed, held_out=purpose == "eval")


def _rows(data: DataConfig, *, seed: int, held_out: bool) -> Rows:
    table = open_table(data, held_out=held_out)
    num_rows = sum(table.blocks)
    start, stop = 0, num_rows
    if not data.holds_out_apart:
        first_held_out = max(0, num_rows - data.eval_tasks)
        start, stop = (first_held_out, num_rows) if held_out else (0, first_held_out)
    if start == stop and not (held_out and data.eval_tasks == 0):
        purpose = "hold out" if held_out else "train on"
        default = type(data).model_fields["eval_tasks"].default
        raise NothingLeft(
            f"data: {table.path} has {num_rows} rows, none of them to {purpose}: lower data.eval_tasks, "
            f"which is {data.eval_tasks} ({default} unless it is given)"
        )
    shuffle_seed = stable_seed(seed, "order") if data.mode == "sample" and not held_out else None
    epochs = 1 if held_out else data.epochs
    return Rows(table, start=start, stop=stop, epochs=epochs, shuffle_seed=shuffle_seed, keys=data.keys)
