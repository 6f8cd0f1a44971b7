"""Approximate nearest neighbours by cosine, in a set of vectors that changes.

Vectors lie in cells of at most `CELL_ROWS` vectors. Each cell has a centre. A query searches the `NUM_PROBED` cells
with the nearest centres. An insertion into a full cell first halves the cell across its widest direction. So cells need
no training, and an insertion changes only a few cells. Deterministic: the same calls give the same cells.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

CELL_ROWS = 256
NUM_PROBED = 8

Key = TypeVar("Key", bound=Hashable)
Vector = npt.NDArray[np.float32]  # [d]


class Neighbours(Generic[Key]):
    """Vectors by key."""

    def __init__(self) -> None:
        self._centres = np.empty((0, 0), dtype=np.float32)  # [cells, d]
        # [cells or more, slots, d]; in one piece, for speed
        self._vectors = np.empty((0, CELL_ROWS, 0), dtype=np.float32)
        self._keys: list[list[Key]] = []  # of each cell, by slot
        self._empty: list[int] = []
        self._slots: dict[Key, tuple[int, int]] = {}  # cell and slot

    def add(self, key: Key, vector: Vector) -> None:
        """Add `vector` under `key`. It must have norm 1 or be zero."""
        if not self._keys:
            self._centres = np.empty((0, len(vector)), dtype=np.float32)
            self._vectors = np.empty((4, CELL_ROWS, len(vector)), dtype=np.float32)
            self._new_cell(vector)
        # Halving moves centres, so the nearest cell may be another full cell.
        while len(self._keys[cell := self._nearest_cell(vector)]) == CELL_ROWS:
            self._halve(cell)
        self._put(cell, key, vector)

    def remove(self, key: Key) -> None:
        """Remove the vector of `key`. The last vector of its cell takes its slot."""
        cell, slot = self._slots.pop(key)
        keys, vectors = self._keys[cell], self._vectors[cell]
        last = keys.pop()
        if slot < len(keys):
            keys[slot], vectors[slot] = last, vectors[len(keys)]
            self._slots[last] = (cell, slot)
        if not keys:
            self._centres[cell] = 0
            self._empty.append(cell)

    def nearest(self, vector: Vector, count: int) -> tuple[list[Key], Vector]:
        """Return up to `count` keys and their cosines, in arbitrary order."""
        if not self._slots:
            return [], np.empty(0, dtype=np.float32)
        cells = _highest(self._centres @ vector, NUM_PROBED).tolist()
        keys = [self._keys[cell] for cell in cells]
        cosines = np.concatenate([self._vectors[cell, : len(keys[nth])] @ vector for nth, cell in enumerate(cells)])
        starts = [0, *accumulate(map(len, keys))]
        best = _highest(cosines, count)
        found = [(bisect_right(starts, index) - 1, index) for index in best.tolist()]
        return [keys[nth][index - starts[nth]] for nth, index in found], cosines[best]

    def _nearest_cell(self, vector: Vector) -> int:
        return int(np.argmax(self._centres @ vector))

    def _put(self, cell: int, key: Key, vector: Vector) -> None:
        keys = self._keys[cell]
        if not keys and cell in self._empty:
            self._empty.remove(cell)
            self._centres[cell] = vector
        self._vectors[cell][len(keys)] = vector
        self._slots[key] = (cell, len(keys))
        keys.append(key)

    def _new_cell(self, centre: Vector) -> int:
        if self._empty:
            cell = self._empty.pop()
            self._centres[cell] = centre
            return cell
        self._keys.append([])
        if len(self._keys) > len(self._vectors):
            self._vectors = np.concatenate([self._vectors, np.empty_like(self._vectors)])
        self._centres = np.vstack([self._centres, centre])
        return len(self._keys) - 1

    def _halve(self, cell: int) -> None:
        """Split a full cell into two cells, by nearness to two vectors that are far apart.

        Both halves have the same size. So new cells are half full, even if all vectors are equal.
        """
        vectors, keys = self._vectors[cell].copy(), self._keys[cell]
        one = vectors[np.argmin(vectors @ vectors.mean(axis=0))]
        other = vectors[np.argmin(vectors @ one)]
        order = np.argsort(vectors @ (one - other), kind="stable")
        halves = order[: CELL_ROWS // 2], order[CELL_ROWS // 2 :]
        self._keys[cell] = []
        for half, target in zip(halves, (cell, self._new_cell(one)), strict=True):
            self._centres[target] = _unit(vectors[half].mean(axis=0))
            for index in half.tolist():
                self._put(target, keys[index], vectors[index])


def _highest(values: Vector, count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the `count` highest values, in arbitrary order."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.argpartition(values, len(values) - count)[len(values) - count :]


def _unit(vector: Vector) -> Vector:
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm > 0 else vector
