"""All numbers of metrics.jsonl, as columns that are read one by one.

Complete blocks of `BLOCK_ROWS` lines are kept in a file (`block_file.py`); the newer lines are kept in memory. While an
old run is read for the first time, its curve is known from lines at even distances, so that it is visible at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.dashboard.block_file import BlockFile
from penstock.dashboard.growing_file import GrowingFile, Lines

Floats = npt.NDArray[np.float64]
Row = dict[str, float]

BLOCK_ROWS = 256
PIECE_BYTES = 1 << 18
"""Bytes that are decoded without a pause."""
MOST_NAMES = 4096
"""Number of series. A file with more was not written by a run, and the further names are left out."""
MOST_DEPTH = 4
"""Levels of nested values."""
NUM_SAMPLES = 400
"""Number of lines that stand for the part of a file that is not read yet."""
LAST_BYTES = 1 << 20
"""Bytes at the end of such a part of which every line is read."""


class BlockOfSteps(msgspec.Struct):
    """The header of a block. Its columns are float64, one for each name, NaN where a line has no number."""

    begin: int
    end: int
    """Bytes of metrics.jsonl."""
    num_rows: int
    num_damaged: int
    names: list[str]


class MetricsIndex:
    """The numbers of one run. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._file = GrowingFile(run_dir / "metrics.jsonl")
        self._lines = Lines(dict[str, Any])
        self._blocks = BlockFile(run_dir, "metrics", self._file, BlockOfSteps)
        self._lock = threading.RLock()
        self._names: dict[str, None] = {}
        self._begin()
        if self._offset > self._file.size:
            self._start_again()

    def _begin(self) -> None:
        """Take what the file of blocks holds."""
        headers = [block.header for block in self._blocks.blocks]
        self._offset = headers[-1].end if headers else 0
        """Bytes of metrics.jsonl that are read."""
        self._rows: list[Row] = []
        """The lines after the last block."""
        self._rows_begin = self._offset
        self._num_damaged = sum(header.num_damaged for header in headers)
        self._num_damaged_since = 0
        self._samples: list[tuple[int, Row]] | None = None
        """Lines of the part that is not read yet, each with its offset; None before they are looked for."""
        self._names = dict.fromkeys(name for header in headers for name in header.names)
        for before, header in pairwise(headers):
            if header.names == before.names:
                header.names = before.names  # one list for all blocks with the same names

    def _start_again(self) -> None:
        self._blocks.clear()
        self._begin()

    @property
    def unread(self) -> int:
        """Return how many bytes of the file are not read yet."""
        return max(self._file.size - self._offset, 0)

    @property
    def indexed(self) -> float:
        """Return the share of the file that is read, at most 1."""
        unread = self.unread
        return self._offset / (self._offset + unread) if unread > PIECE_BYTES else 1.0

    @property
    def names(self) -> list[str]:
        """Return the names of all series, in order of appearance."""
        with self._lock:
            found = dict(self._names)
            for row in self._rest():
                found |= dict.fromkeys(row)
            return list(found)[:MOST_NAMES]

    @property
    def warnings(self) -> list[str]:
        """Return what could not be read."""
        num_damaged = self._num_damaged + self._num_damaged_since
        return [f"metrics.jsonl: {num_damaged} damaged lines"] if num_damaged else []

    def update(self) -> bool:
        """Read the next piece of the file; return whether there was one."""
        with self._lock:
            if self._file.is_replaced(self._offset):
                self._start_again()
            data = self._file.whole_lines(self._offset, PIECE_BYTES)
            if not data:
                return False
            self._take(data)
            return True

    def columns(self, names: Sequence[str]) -> dict[str, Floats]:
        """Return columns by name, one value for each line that is known, in the order of the file."""
        with self._lock:
            rest = self._rest()
            parts: dict[str, list[Floats]] = {name: [] for name in names}
            for block in self._blocks.blocks:
                header = block.header
                places = {name: place for place, name in enumerate(header.names)} if names else {}
                for name in names:
                    place, num_bytes = places.get(name), 8 * header.num_rows
                    if place is None:
                        parts[name].append(np.full(header.num_rows, np.nan))
                    else:
                        parts[name].append(np.frombuffer(self._blocks.read(block, place * num_bytes, num_bytes)))
            for name in names:
                parts[name].append(np.array([row.get(name, np.nan) for row in rest]))
            return {name: np.concatenate(found) for name, found in parts.items()}

    def last_rows(self, after: int | None) -> tuple[list[Row], int]:
        """Return the rows that were read since there were `after` rows, at most those that are not in a block yet, and
        the number of all rows. None returns the last row."""
        with self._lock:
            in_blocks = sum(block.header.num_rows for block in self._blocks.blocks)
            total = in_blocks + len(self._rows)
            first = total - 1 if after is None else after
            return (self._rows[max(first - in_blocks, 0) :] if first < total else []), total

    def pieces(self) -> Iterator[tuple[list[str], Floats]]:
        """Yield all lines that are read, block by block: names, and values of shape (names, lines)."""
        with self._lock:
            blocks, rows = list(self._blocks.blocks), list(self._rows)
        for block in blocks:
            names, num_rows = block.header.names, block.header.num_rows
            data = self._blocks.read(block, 0, 8 * len(names) * num_rows)
            yield names, np.frombuffer(data).reshape(len(names), num_rows)
        if rows:
            names = list(dict.fromkeys(name for row in rows for name in row))[:MOST_NAMES]
            yield names, _values(names, rows)

    def close(self) -> None:
        """Close the file of blocks."""
        with self._lock:
            self._blocks.close()

    def _take(self, data: bytes) -> None:
        """Add whole lines. Each full block is written."""
        place = 0
        while place < len(data):
            end = _end_of_lines(data, place, BLOCK_ROWS - len(self._rows))
            records, num_damaged = self._lines.decode(data[place:end])
            rows = [row for record in records if (row := row_of(record))]
            self._num_damaged_since += num_damaged + len(records) - len(rows)
            self._rows += rows
            self._offset += end - place
            place = end
            if len(self._rows) >= BLOCK_ROWS:
                self._write_block()

    def _write_block(self) -> None:
        names = list(dict.fromkeys(name for row in self._rows for name in row))[:MOST_NAMES]
        header = BlockOfSteps(
            begin=self._rows_begin,
            end=self._offset,
            num_rows=len(self._rows),
            num_damaged=self._num_damaged_since,
            names=names,
        )
        self._blocks.append(header, _values(names, self._rows).tobytes())
        self._names |= dict.fromkeys(names)
        self._num_damaged += self._num_damaged_since
        self._rows, self._rows_begin, self._num_damaged_since = [], self._offset, 0

    def _rest(self) -> list[Row]:
        """Return the rows after the last block: those that are read, and samples of those that are not."""
        if self.unread <= PIECE_BYTES:
            self._samples = None
            return self._rows
        if self._samples is None:
            self._samples = self._sample()
        return [*self._rows, *(row for offset, row in self._samples if offset >= self._offset)]

    def _sample(self) -> list[tuple[int, Row]]:
        """Return lines at even distances, and all lines at the end of the file."""
        begin, end = self._offset, self._file.size
        dense = max(begin, end - LAST_BYTES)
        found: dict[int, Row] = {}
        for offset in np.linspace(begin, dense, NUM_SAMPLES, endpoint=False, dtype=np.int64).tolist():
            at, line = self._file.first_line_after(offset)
            if line and (record := self._lines.one(line)) is not None and (row := row_of(record)):
                found[at] = row
        at, _ = self._file.first_line_after(dense)
        for line in self._file.whole_lines(at, LAST_BYTES).splitlines(keepends=True):
            if (record := self._lines.one(line)) is not None and (row := row_of(record)):
                found[at] = row
            at += len(line)
        return sorted(found.items())


def row_of(record: Mapping[str, Any]) -> Row:
    """Return the numbers of a metrics line, those of nested values under names like `ledger/trained`; empty if the line
    has no step and no time."""
    row: Row = {}
    _flatten(record, "", row, 0)
    return row if "step" in row and "time" in row else {}


def _flatten(record: Mapping[str, Any], prefix: str, row: Row, depth: int) -> None:
    for name, value in record.items():
        if len(row) >= MOST_NAMES:
            return
        kind = type(value)
        if kind is float or kind is int or kind is bool:
            row[prefix + name] = float(value)
        elif kind is dict and depth < MOST_DEPTH:
            _flatten(value, f"{prefix}{name}/", row, depth + 1)


def _values(names: Sequence[str], rows: Sequence[Row]) -> Floats:
    """Return the values of rows as an array of shape (names, rows)."""
    if all(row.keys() == rows[0].keys() for row in rows) and len(names) == len(rows[0]):
        return np.array([list(row.values()) for row in rows]).T.copy()
    return np.array([[row.get(name, np.nan) for row in rows] for name in names]).reshape(len(names), len(rows))


def _end_of_lines(data: bytes, begin: int, num_lines: int) -> int:
    """Return where the `num_lines`-th line from `begin` on ends, at most the end of the data."""
    for _ in range(num_lines):
        end = data.find(b"\n", begin)
        if end < 0:
            return len(data)
        begin = end + 1
    return begin
