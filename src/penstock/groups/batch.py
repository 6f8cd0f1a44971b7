"""The batch that travels between a driver and its workers: named columns over the same n samples.

`columns` are arrays (numpy or torch) with n as their first dimension. `values` are lists of n Python objects, for
ragged data. `meta` describes the batch as a whole and travels along. Every operation returns a new batch and changes
nothing in place. Batches share arrays where this is safe.

On the wire (pickle protocol 5) each array is a buffer of its own, which a transport passes on without a copy. A slice
sends only its own bytes. Numpy arrays, and lists of one-dimensional numpy arrays (ragged samples), arrive as views of
the received buffer; they are read-only if the buffer is shared. Tensors arrive on the CPU and without gradients. Torch
has no read-only memory, so tensors from shared memory are copied.

This is a plain class because drivers do not import torch and samples are ragged: `tensordict` needs torch and pads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

PADDING = "is_padding"
"""Column of a padded batch that marks the rows of padding, [n] bool."""
METRICS = "metrics"
"""Key of `meta` with values that may differ between joined batches."""

Rows = Sequence[int] | npt.NDArray[Any]
"""Row numbers in the requested order, or a mask [n] bool."""


class Batch:
    """A batch of n samples, stored by column."""

    __slots__ = ("_num_samples", "columns", "meta", "values")

    def __init__(
        self,
        columns: Mapping[str, Any] | None = None,
        values: Mapping[str, Sequence[Any]] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.columns: dict[str, Any] = dict(columns or {})
        self.values: dict[str, list[Any]] = {name: list(value) for name, value in (values or {}).items()}
        self.meta: dict[str, Any] = dict(meta or {})
        for name, column in self.columns.items():
            if not getattr(column, "shape", ()):
                raise TypeError(
                    f"batch column {name!r} is {type(column).__name__}, expected an array of samples: put Python "
                    "objects into `values`, and facts about the whole batch into `meta`"
                )
        if both := self.columns.keys() & self.values.keys():
            raise ValueError(f"batch column {min(both)!r} is given twice")
        sizes = {name: len(column) for name, column in (*self.columns.items(), *self.values.items())}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"batch columns differ in length: {sizes}")
        self._num_samples = next(iter(sizes.values()), 0)

    def __len__(self) -> int:
        return self._num_samples

    def __repr__(self) -> str:
        return f"Batch({len(self)} samples of {', '.join(self.names) or 'nothing'})"

    @property
    def names(self) -> list[str]:
        """Return the names of all columns, including ragged ones."""
        return [*self.columns, *self.values]

    @property
    def is_padding(self) -> npt.NDArray[np.bool_]:
        """Return the mask of padding, [n] bool. These rows only fill the batch."""
        return np.asarray(self.columns.get(PADDING, np.zeros(len(self))), dtype=np.bool_)

    def __getitem__(self, wanted: str | slice) -> Any:
        """Return a column by name, or a slice of samples. A slice with step 1 shares its arrays with this batch."""
        if isinstance(wanted, str):
            return self.columns[wanted] if wanted in self.columns else self.values[wanted]
        if wanted.step not in (None, 1):
            return self.select(range(*wanted.indices(len(self))))
        columns = {name: column[wanted] for name, column in self.columns.items()}
        return Batch(columns, {name: value[wanted] for name, value in self.values.items()}, self.meta)

    def select(self, rows: Rows) -> Batch:
        """Return the samples at `rows`, in that order."""
        numbers = np.asarray(rows)
        if numbers.dtype == np.bool_:
            if numbers.shape != (len(self),):
                raise ValueError(f"a mask of {numbers.size} rows does not select from {len(self)} samples")
            numbers = np.flatnonzero(numbers)
        numbers = numbers.astype(np.int64)
        columns = {name: column[numbers] for name, column in self.columns.items()}
        return Batch(columns, {name: [value[i] for i in numbers] for name, value in self.values.items()}, self.meta)

    def keep(self, names: Iterable[str]) -> Batch:
        """Return only these columns. The column `is_padding` always stays."""
        wanted = {*names, *({PADDING} & self.columns.keys())}
        if unknown := wanted - set(self.names):
            raise ValueError(f"the batch has no column {min(unknown)!r}: it has {self.names}")
        columns = {name: column for name, column in self.columns.items() if name in wanted}
        return Batch(columns, {name: value for name, value in self.values.items() if name in wanted}, self.meta)

    def repeat(self, times: int, *, interleave: bool = True) -> Batch:
        """Return every sample `times` times. With `interleave` the copies of a sample are neighbours; without it the
        whole batch repeats."""
        rows = np.arange(len(self))
        return self.select(np.repeat(rows, times) if interleave else np.tile(rows, times))

    def union(self, other: Batch) -> Batch:
        """Return the columns and `meta` of both batches, over the same samples. Columns and keys in both must be
        equal."""
        if self.names and other.names and len(self) != len(other):
            raise ValueError(f"batches of {len(self)} and {len(other)} samples have no union")
        for name in set(self.names) & set(other.names):
            if not _same(self[name], other[name]):
                raise ValueError(f"both batches have a column {name!r}, with different content")
        return Batch(self.columns | other.columns, self.values | other.values, _agreed([self.meta, other.meta]))

    def chunk(self, num_chunks: int, *, pad: bool = False) -> list[Batch]:
        """Cut the batch into `num_chunks` runs of neighbouring samples. Their lengths differ by at most one, and some
        may be empty. With `pad` the batch is padded if needed, so that all lengths are equal."""
        if not pad or len(self) % num_chunks == 0:
            cuts = [len(self) * i // num_chunks for i in range(num_chunks + 1)]
            return [self[start:end] for start, end in pairwise(cuts)]
        size = math.ceil(len(self) / num_chunks)
        return [self._filled(i * size, (i + 1) * size) for i in range(num_chunks)]

    def pad(self, multiple: int) -> Batch:
        """Return the batch filled up to a multiple of `multiple` samples with copies of its last sample. The column
        `is_padding` marks the copies. An empty batch stays empty."""
        return self._filled(0, math.ceil(len(self) / multiple) * multiple)

    def unpad(self) -> Batch:
        """Return the batch without its rows of padding and without the column `is_padding`."""
        rest = Batch({name: c for name, c in self.columns.items() if name != PADDING}, self.values, self.meta)
        return rest.select(~self.is_padding) if self.is_padding.any() else rest

    def _filled(self, start: int, end: int) -> Batch:
        if PADDING in self.columns:
            raise ValueError(f"the batch of {len(self)} samples is padded already: unpad it first")
        rows, last = np.arange(start, end), len(self) - 1
        part = self[start:end] if end <= len(self) else self.select(np.minimum(rows, last))
        return Batch({**part.columns, PADDING: rows > last}, part.values, part.meta)

    @staticmethod
    def concat(batches: Iterable[Batch]) -> Batch:
        """Return the samples of all batches in order. All batches must have the same columns, and equal values for
        `meta` keys that they share. Under `metrics` each key gets the list of all values. A batch without columns adds
        no samples."""
        given = list(batches)
        meta, parts = _joined_meta([part.meta for part in given]), [part for part in given if part.names]
        if not parts:
            return Batch(meta=meta)
        for part in parts[1:]:
            if part.columns.keys() != parts[0].columns.keys() or part.values.keys() != parts[0].values.keys():
                raise ValueError(f"batches have different columns: {sorted(parts[0].names)} and {sorted(part.names)}")
        columns = {name: join([part.columns[name] for part in parts]) for name in parts[0].columns}
        values = {name: [value for part in parts for value in part.values[name]] for name in parts[0].values}
        return Batch(columns, values, meta)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        columns = {name: _column_to_wire(column) for name, column in self.columns.items()}
        values = {name: _values_to_wire(value) for name, value in self.values.items()}
        return _from_wire, (columns, values, self.meta)


def join(arrays: Sequence[Any]) -> Any:
    """Join arrays of one kind (numpy or torch) along their first dimension."""
    if isinstance(arrays[0], np.ndarray):
        return np.concatenate(arrays)
    import torch  # only needed if a column is a tensor already

    return torch.cat(list(arrays))


def _joined_meta(metas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    metrics: dict[str, list[Any]] = {}
    for meta in metas:
        for name, value in meta.get(METRICS, {}).items():
            metrics.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    agreed = _agreed([{key: value for key, value in meta.items() if key != METRICS} for meta in metas])
    return agreed | ({METRICS: metrics} if any(METRICS in meta for meta in metas) else {})


def _agreed(metas: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in merged and not _same(merged[key], value):
                raise ValueError(f"batches differ in meta {key!r}: {merged[key]!r} and {value!r}")
            merged[key] = value
    return merged


def _same(left: Any, right: Any) -> bool:
    """Return whether two values have equal content; arrays must also have equal types and shapes. NaN equals NaN."""
    if left is right:
        return True
    if _is_array(left) or _is_array(right):
        if type(left) is not type(right) or left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_same, left, right))
    return bool(left == right or (left != left and right != right))


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _column_to_wire(column: Any) -> Any:
    """Return a contiguous array; for a tensor return its bytes, dtype and shape."""
    if isinstance(column, np.ndarray):
        return column if column.flags.forc else np.ascontiguousarray(column)
    import torch

    raw = column.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw, str(column.dtype).removeprefix("torch."), tuple(column.shape)


def _column_from_wire(column: Any) -> Any:
    if isinstance(column, np.ndarray):
        return column
    import torch

    raw, dtype, shape = column
    if not raw.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(getattr(torch, dtype)).reshape(shape)


def _values_to_wire(values: list[Any]) -> Any:
    """Return one joined array and the lengths of its pieces if all values are one-dimensional arrays of one dtype; else
    return the list."""
    kinds = {(type(value), value.dtype, value.ndim) if isinstance(value, np.ndarray) else None for value in values}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or kind[0] is not np.ndarray or kind[1].hasobject or kind[2] != 1:
        return values
    return np.concatenate(values), np.asarray([len(value) for value in values], dtype=np.int64)


def _values_from_wire(values: Any) -> list[Any]:
    if isinstance(values, list):
        return values
    joined, lengths = values
    return [joined[start:end] for start, end in pairwise(accumulate(lengths.tolist(), initial=0))]


def _from_wire(columns: Mapping[str, Any], values: Mapping[str, Any], meta: Mapping[str, Any]) -> Batch:
    arrays = {name: _column_from_wire(column) for name, column in columns.items()}
    return Batch(arrays, {name: _values_from_wire(value) for name, value in values.items()}, meta)
