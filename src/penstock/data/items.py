"""Numbered items that become the tasks of a tag: from a procedural dataset, from table rows, or from seeds alone."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from penstock.config import ConfigError, DataConfig
from penstock.config.imports import import_package
from penstock.data.table_files import Row, Table, open_table
from penstock.row_settings import own_limit, own_temperature
from penstock.seeding import nth_seed, stable_seed
from penstock.sendable import fault_of
from penstock.types import Purpose

_ENDLESS = 2**31 - 1
DRAWN_AT_ONCE = frozenset({"acre", "composite", "gsm_symbolic", "list_functions", "word_ladder"})
"""Datasets of reasoning-gym that cannot be endless: they draw for all their tasks when they are created, or have a
largest size. `composite` may consist of such datasets."""
PIECE_SIZE = 2000
"""Number of tasks that such a dataset draws at once."""
NUM_ROUNDS = 4
"""Rounds of the Feistel network. Four are enough for an order that need not resist attacks."""

Item = tuple[str, Row]
"""(name, payload)."""


class RowError(ConfigError):
    """A row that cannot be played."""

    tag = ""
    """Tag of the row's tasks."""


class NothingLeft(ConfigError):
    """No rows are left to train on, or no rows can be held out."""


class Items(Protocol):
    """A finite or endless collection of numbered items."""

    size: int | None
    """Number of items; None if endless."""

    def item(self, number: int) -> Item:
        """Return item `number`, which must be below `size`. Equal numbers give equal items."""


class ReasoningGym:
    """An endless procedural dataset of reasoning-gym (github.com/open-thought/reasoning-gym). For a dataset that cannot
    be endless, it creates one piece after the other, each with its own seed."""

    size: int | None = None

    def __init__(self, dataset: str, options: dict[str, Any], *, seed: int, name: str) -> None:
        self._create = _creator(dataset, options)
        self._seed, self._name = seed, f"{dataset}/{name}"
        self._piece_size = PIECE_SIZE if dataset in DRAWN_AT_ONCE else _ENDLESS
        self._number, self._piece = 0, self._create(seed, self._piece_size)

    def item(self, number: int) -> Item:
        piece, index = divmod(number, self._piece_size)
        if piece != self._number:
            seed = nth_seed(self._seed, piece) >> 32 if piece else self._seed
            self._number, self._piece = piece, self._create(seed, self._piece_size)
        with _global_seed(nth_seed(self._seed, number) >> 32):
            return f"{self._name}/{number}", _without_numpy(self._piece[index])


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed the generators that Python's and numpy's functions share during the body: some datasets draw from them."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _creator(dataset: str, options: dict[str, Any]) -> Callable[[int, int], Sequence[Row]]:
    """Return the function that creates a dataset with a seed and a size. Raises `ConfigError`."""
    needed_by = "data.source reasoning_gym"
    reasoning_gym = import_package("reasoning_gym", needed_by=needed_by, install="'penstock[tasks]'")

    def create(seed: int, size: int) -> Sequence[Row]:
        try:
            created: Sequence[Row] = reasoning_gym.create_dataset(dataset, seed=seed, size=size, **options)
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"data.dataset {dataset} with options {options}: {error}") from None
        return created

    return create


class Seeds:
    """Endless items with an empty payload, for environments that build each task from its seed."""

    size: int | None = None

    def __init__(self, *, name: str) -> None:
        self._name = f"seed/{name}"

    def item(self, number: int) -> Item:
        return f"{self._name}/{number}", {}


class Rows:
    """Rows `start` to `stop` of a table, in file order or shuffled, for `epochs` epochs (None: endless)."""

    def __init__(
        self, table: Table, *, start: int, stop: int, epochs: int | None, shuffle_seed: int | None, keys: list[str]
    ) -> None:
        self._table, self._keys = table, keys
        self._start, self._num_rows = start, stop - start
        self._shuffle_seed = shuffle_seed
        """None keeps the file order."""
        self._bounds: list[int] = (np.unique(np.clip(np.cumsum([0, *table.blocks]), start, stop)) - start).tolist()
        """Bounds of the table's blocks, relative to `start` and cut to the used rows."""
        self._blocks = lru_cache(2)(self._shuffled_blocks)
        self.size = None if epochs is None else epochs * self._num_rows

    def item(self, number: int) -> Item:
        epoch, place = divmod(number, self._num_rows)
        found = self._start + (place if self._shuffle_seed is None else self._shuffled(epoch, place))
        row = self._read(found)
        if any(key not in row for key in self._keys):
            lacking = ", ".join(key for key in self._keys if key not in row)
            raise RowError(f"data: {self._table.where(found)}: has no {lacking}; it has {', '.join(row)}")
        try:
            own_limit(row)
            own_temperature(row)
        except ValueError as error:
            raise RowError(f"data: {self._table.where(found)}: {error}") from None
        return f"{self._table.name}/{found + 1}", row

    def _read(self, number: int) -> Row:
        """Return row `number` of the table. Raises `RowError` if it cannot be read, or sent to another process."""
        try:
            row = self._table.row(number)
        except RecursionError:
            raise RowError(f"data: {self._table.where(number)}: the row is nested too deeply") from None
        except ConfigError as error:
            raise RowError(str(error)) from error
        except Exception as error:  # whatever the readers of a format raise
            reason = f"{type(error).__name__}: {error}"
            raise RowError(f"data: {self._table.where(number)}: the row cannot be read ({reason})") from error
        for key, value in row.items():
            if fault := fault_of(key) or fault_of(value):
                raise RowError(f"data: {self._table.where(number)}: {key!a} has {fault}: correct or remove the row")
        return row

    def _shuffled(self, epoch: int, place: int) -> int:
        """Return the row number at `place` in the shuffled order of `epoch`.

        The order shuffles the blocks, and then the rows within each block. Rows of one block are therefore read
        together, which is cheap.
        """
        order, ends = self._blocks(epoch)
        at = bisect_right(ends, place)
        block = order[at]
        start, stop = self._bounds[block], self._bounds[block + 1]
        within = place - (ends[at] - (stop - start))
        return start + permuted(within, stop - start, seed=stable_seed(self._shuffle_seed, epoch, block))

    def _shuffled_blocks(self, epoch: int) -> tuple[list[int], list[int]]:
        """Return the shuffled block numbers of `epoch`, and the cumulative number of rows after each block."""
        num_blocks, seed = len(self._bounds) - 1, stable_seed(self._shuffle_seed, epoch)
        order = [permuted(number, num_blocks, seed=seed) for number in range(num_blocks)]
        return order, np.cumsum(np.diff(self._bounds)[order]).tolist()


def permuted(number: int, size: int, *, seed: int) -> int:
    """Return the image of `number` (0..size-1) under the permutation that `seed` selects. No list is stored, and all
    machines and versions get the same order.

    A Feistel network permutes the next larger power of four. It is applied again until the result is below `size`
    (cycle walking; Black and Rogaway 2002).
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for round_number in range(NUM_ROUNDS):
            left, right = right, left ^ (nth_seed(seed + round_number, right) & mask)
        number = left << half | right
        if number < size:
            return number


def open_items(data: DataConfig, *, seed: int, purpose: Purpose, tag: str) -> Items:
    """Return the items of `data` for one tag and purpose. Training items and held-out items differ."""
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


def _without_numpy(value: Any) -> Any:
    """Return a value with Python's own strings and numbers for numpy's, which no message can carry."""
    match value:
        case dict():
            return {_without_numpy(key): _without_numpy(each) for key, each in value.items()}
        case list() | tuple():
            return type(value)(map(_without_numpy, value))
        case np.generic():
            return value.item()
    return value
