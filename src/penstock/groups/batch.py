"""The batch that travels between a driver and its workers: named columns over the same n samples.

`columns` are arrays (numpy or torch) whose first dimension is n; `values` are lists of n Python objects, for what is
ragged. Every operation returns a new batch; nothing is padded or changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np


class Batch:
    """n samples by column."""

    __slots__ = ("_num_samples", "columns", "values")

    def __init__(
        self, columns: Mapping[str, Any] | None = None, values: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        self.columns: dict[str, Any] = dict(columns or {})
        self.values: dict[str, list[Any]] = {name: list(value) for name, value in (values or {}).items()}
        sizes = {name: len(column) for name, column in (*self.columns.items(), *self.values.items())}
        if both := self.columns.keys() & self.values.keys():
            raise ValueError(f"batch column {min(both)!r} is given twice")
        if len(set(sizes.values())) > 1:
            raise ValueError(f"batch columns differ in length: {sizes}")
        self._num_samples = next(iter(sizes.values()), 0)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, name: str) -> Any:
        return self.columns[name] if name in self.columns else self.values[name]

    def select(self, indices: Sequence[int] | np.ndarray[Any, Any]) -> Batch:
        """The samples at `indices`, in that order."""
        picked = np.asarray(indices, dtype=np.int64)
        columns = {name: column[picked] for name, column in self.columns.items()}
        return Batch(columns, {name: [value[i] for i in picked] for name, value in self.values.items()})

    def chunk(self, num_chunks: int) -> list[Batch]:
        """Cut into `num_chunks` runs of neighbours whose lengths differ by at most one; some may be empty."""
        cuts = [len(self) * i // num_chunks for i in range(num_chunks + 1)]
        return [self._slice(start, end) for start, end in pairwise(cuts)]

    def _slice(self, start: int, end: int) -> Batch:
        columns = {name: column[start:end] for name, column in self.columns.items()}
        return Batch(columns, {name: value[start:end] for name, value in self.values.items()})

    @staticmethod
    def concat(batches: Iterable[Batch]) -> Batch:
        """The samples of all batches in order. All must have the same columns."""
        parts = list(batches)
        if not parts:
            return Batch()
        for part in parts[1:]:
            if part.columns.keys() != parts[0].columns.keys() or part.values.keys() != parts[0].values.keys():
                raise ValueError(f"batches have different columns: {_names(parts[0])} and {_names(part)}")
        columns = {name: _join([part.columns[name] for part in parts]) for name in parts[0].columns}
        values = {name: [value for part in parts for value in part.values[name]] for name in parts[0].values}
        return Batch(columns, values)


def _names(batch: Batch) -> list[str]:
    return sorted((*batch.columns, *batch.values))


def _join(arrays: list[Any]) -> Any:
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import torch  # only where a column already is a tensor

    return torch.cat(arrays)
