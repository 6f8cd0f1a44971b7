"""Approximate nearest neighbours by cosine among vectors that come and go.

Vectors lie in cells of at most `CELL_ROWS`, each with a centre; a query looks into the `NUM_PROBED` cells whose centres
are nearest. A full cell is halved across its widest direction, so cells never need to be trained and no insertion
touches more than one. Deterministic: the same calls leave the same cells.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

CELL_ROWS = 256
NUM_PROBED = 8

Scalar = TypeVar("Scalar", bound=np.generic)
Vector = npt.NDArray[np.float32]  # [d]


class Neighbours:
    """Vectors by row number; row numbers are small and may be used again."""

    def __init__(self) -> None:
        self._vectors = np.empty((0, CELL_ROWS, 0), dtype=np.float32)  # [cells, slots, d]
        self._centres = np.empty((0, 0), dtype=np.float32)  # [cells, d]
        self._rows = np.empty((0, CELL_ROWS), dtype=np.int64)  # row number in each slot
        self._sizes: list[int] = []
        self._empty: list[int] = []
        self._places: dict[int, tuple[int, int]] = {}

    def add(self, row: int, vector: Vector) -> None:
        """`vector` has length 1, or is zero."""
        if not self._sizes:
            self._vectors = np.empty((0, CELL_ROWS, len(vector)), dtype=np.float32)
            self._centres = np.empty((0, len(vector)), dtype=np.float32)
            self._new_cell(vector)
        cell = self._nearest_cell(vector)
        while self._sizes[cell] == CELL_ROWS:  # centres move in halving, so the next nearest may be another full one
            self._halve(cell)
            cell = self._nearest_cell(vector)
        self._put(cell, row, vector)

    def remove(self, row: int) -> None:
        """The last vector of the cell takes its slot."""
        cell, slot = self._places.pop(row)
        last = self._sizes[cell] - 1
        if slot != last:
            moved = int(self._rows[cell, last])
            self._rows[cell, slot] = moved
            self._vectors[cell, slot] = self._vectors[cell, last]
            self._places[moved] = (cell, slot)
        self._sizes[cell] = last
        if last == 0:
            self._centres[cell] = 0
            self._empty.append(cell)

    def nearest(self, vector: Vector, count: int) -> tuple[npt.NDArray[np.int64], Vector]:
        """Up to `count` rows and their cosines, in no particular order."""
        if not self._places:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        cells = _highest(self._centres[: len(self._sizes)] @ vector, NUM_PROBED).tolist()
        cosines = np.concatenate([self._vectors[cell, : self._sizes[cell]] @ vector for cell in cells])
        rows = np.concatenate([self._rows[cell, : self._sizes[cell]] for cell in cells])
        best = _highest(cosines, count)
        return rows[best], cosines[best]

    def __len__(self) -> int:
        return len(self._places)

    def _nearest_cell(self, vector: Vector) -> int:
        return int(np.argmax(self._centres[: len(self._sizes)] @ vector))

    def _put(self, cell: int, row: int, vector: Vector) -> None:
        slot = self._sizes[cell]
        if slot == 0 and cell in self._empty:
            self._empty.remove(cell)
            self._centres[cell] = vector
        self._vectors[cell, slot] = vector
        self._rows[cell, slot] = row
        self._places[row] = (cell, slot)
        self._sizes[cell] = slot + 1

    def _new_cell(self, centre: Vector) -> int:
        if self._empty:
            cell = self._empty.pop()
        else:
            cell = len(self._sizes)
            self._sizes.append(0)
            if cell == len(self._vectors):
                self._grow(max(4, 2 * cell))
        self._centres[cell] = centre
        return cell

    def _grow(self, num_cells: int) -> None:
        self._vectors = _enlarged(self._vectors, num_cells)
        self._centres = _enlarged(self._centres, num_cells)
        self._rows = _enlarged(self._rows, num_cells)

    def _halve(self, cell: int) -> None:
        """Move the half that is nearer to one of two far-apart vectors into a cell of its own.

        Halves are equal, so that cells are half full when they are made, even if all vectors are the same.
        """
        vectors, rows = self._vectors[cell].copy(), self._rows[cell].tolist()
        one = vectors[np.argmin(vectors @ vectors.mean(axis=0))]
        other = vectors[np.argmin(vectors @ one)]
        order = np.argsort(vectors @ (one - other), kind="stable")
        halves = order[: CELL_ROWS // 2], order[CELL_ROWS // 2 :]
        self._sizes[cell] = 0
        for half, target in zip(halves, (cell, self._new_cell(one)), strict=True):
            self._centres[target] = _unit(vectors[half].mean(axis=0))
            for index in half.tolist():
                self._put(target, rows[index], vectors[index])


def _highest(values: Vector, count: int) -> npt.NDArray[np.intp]:
    """Where the `count` highest values are."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.argpartition(values, len(values) - count)[len(values) - count :]


def _unit(vector: Vector) -> Vector:
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm > 0 else vector


def _enlarged(array: npt.NDArray[Scalar], length: int) -> npt.NDArray[Scalar]:
    larger = np.empty((length, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger
