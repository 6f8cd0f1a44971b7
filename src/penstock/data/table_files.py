"""Rows of data files, read on demand: only requested rows are copied into memory.

For a JSON-lines file the reader keeps the offset of each line. It decodes a Parquet file one row group at a time. A
Hugging Face dataset maps its own files; it reads no other files and no addresses. An unreadable JSON line raises one
`ConfigError` that names its place.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError, DataConfig
from penstock.config.imports import import_package
from penstock.data.dataset_directory import check_features, check_own_files, is_saved

Row = dict[str, Any]
CHUNK_BYTES = 1 << 24
KEPT_ROW_GROUPS = 2
"""Decoded row groups in the cache: the current one, and the previous one, which held-out rows may still use."""


class Table(Protocol):
    """A table of numbered rows."""

    path: Path
    name: str
    """Prefix of the task ids."""
    blocks: list[int]
    """Sizes of runs of rows that are cheap to read together; their sum is the number of rows."""

    def row(self, number: int) -> Row:
        """Return row `number`. Equal numbers give equal rows."""

    def where(self, number: int) -> str:
        """Return the place of row `number` as text for error messages."""


class JsonLines:
    """A file with one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.stem
        try:
            self._file = os.open(path, os.O_RDONLY)
            self._bounds = _line_bounds(self._file)
        except OSError as error:
            raise ConfigError(f"data: {path} cannot be read: {error.strerror}") from None
        self.blocks = [len(self._bounds) - 1]
        self._decode = msgspec.json.Decoder(Row).decode

    def row(self, number: int) -> Row:
        start, end = self._bounds.item(number), self._bounds.item(number + 1)
        try:
            return self._decode(os.pread(self._file, end - start, start))
        except msgspec.DecodeError as error:
            raise ConfigError(f"data: {self.where(number)}: not a JSON object: {error}") from None

    def where(self, number: int) -> str:
        return f"{self.path}, line {number + 1}"


class Parquet:
    """A Parquet file."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self.path, self.name = path, path.stem
        try:
            self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        except (OSError, pyarrow.ArrowException) as error:
            raise ConfigError(f"data: {path} cannot be read as Parquet: {error}") from None
        metadata = self._file.metadata
        self.blocks = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *self.blocks])
        self._columns = lru_cache(KEPT_ROW_GROUPS)(self._read_row_group)

    def _read_row_group(self, group: int) -> list[tuple[str, Any]]:
        """Return (name, array) for each column of the row group."""
        table = self._file.read_row_group(group).combine_chunks()
        return [(name, column.chunk(0)) for name, column in zip(table.column_names, table.columns, strict=True)]

    def row(self, number: int) -> Row:
        group = int(self._starts.searchsorted(number, side="right")) - 1
        place = number - self._starts.item(group)
        return {name: column[place].as_py() for name, column in self._columns(group)}

    def where(self, number: int) -> str:
        return f"{self.path}, row {number + 1}"


class HuggingFace:
    """A Hugging Face dataset in a local directory: written by `save_to_disk`, or a directory of data files."""

    def __init__(self, path: Path, split: str) -> None:
        needed_by = "data.source huggingface"
        datasets = import_package("datasets", needed_by=needed_by, install="'penstock[huggingface]'")
        if not path.is_dir():
            raise ConfigError(f"data: there is no directory {path}: download the dataset and save_to_disk it first")
        check_own_files(path)
        self.path, self._split, self.name = path, split, f"{path.name}/{split}"
        try:
            found = datasets.load_from_disk(str(path)) if is_saved(path) else datasets.load_dataset(str(path))
        except Exception as error:
            raise ConfigError(f"data: {path} cannot be read as a Hugging Face dataset: {error}") from None
        if isinstance(found, datasets.DatasetDict):
            if split not in found:
                raise ConfigError(f"data: {path} has no split {split}; it has {', '.join(found)}")
            found = found[split]
        check_features(path, found.features)
        self._rows = found.with_format(None)
        self.blocks = [len(found)]

    def row(self, number: int) -> Row:
        row: Row = self._rows[number]
        return row

    def where(self, number: int) -> str:
        return f"{self.path}, split {self._split}, row {number + 1}"


def open_table(data: DataConfig, *, held_out: bool) -> Table:
    """Open the table of `data`. Held-out rows may be in another file (`eval_path`) or split (`eval_split`)."""
    path, split = location(data, held_out=held_out)
    match data.source:
        case "jsonl":
            return JsonLines(path)
        case "parquet":
            return Parquet(path)
    return HuggingFace(path, split)


def location(data: DataConfig, *, held_out: bool) -> tuple[Path, str]:
    """Return the path and the split of the training rows, or of the held-out rows."""
    path, split = (data.eval_path, data.eval_split) if held_out else (None, None)
    return Path(path or data.path or ""), split or data.split


def _line_bounds(file: int) -> npt.NDArray[np.int64]:
    """Return the byte offset of each line's start, followed by the end of the last line."""
    found, start = [np.zeros(1, dtype=np.int64)], 0
    while chunk := os.pread(file, CHUNK_BYTES, start):
        found.append(np.flatnonzero(np.frombuffer(chunk, dtype=np.uint8) == ord("\n")) + start + 1)
        start += len(chunk)
    bounds = np.concatenate(found)
    return bounds if bounds[-1] == start else np.append(bounds, start)
