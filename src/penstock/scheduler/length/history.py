"""Length from what the same task, or similar ones, took before.

One entry per text, named by its digest, so that similar texts stay apart however alike their vectors are. Lengths are
averaged as logarithms, so a prediction is a geometric mean. A task with few observations of its own is blended with its
nearest neighbours, and those with the mean of all tasks the less they resemble it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from penstock.scheduler.length.embedding import Embedding
from penstock.scheduler.length.features import digest, text_of
from penstock.scheduler.length.neighbours import Neighbours, Vector
from penstock.types import Task

NUM_NEIGHBOURS = 8
SHARPNESS = 4  # a neighbour of cosine c weighs c ** SHARPNESS
PRIOR_WEIGHT = 0.1  # of the mean of all tasks
OWN_WEIGHT = 4.0  # of each of a task's own observations, in the same unit
KNOWN = 4  # own observations from which on neighbours are not asked
LEAST_RATE = 0.25  # of a task's latest observation: the policy changes, old lengths count less and less
OVERALL_WINDOW = 1024  # observations the mean of all tasks remembers, roughly


@dataclass(slots=True)
class _Entry:
    row: int
    log_length: float
    num_observed: int = 1


class HistoryPredictor:
    """Remembers up to `max_entries` texts; the longest unobserved goes first."""

    def __init__(self, *, embed: Embedding, max_entries: int, max_new_tokens: int) -> None:
        self._embed, self._max_entries, self._max_new_tokens = embed, max_entries, max_new_tokens
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # longest unobserved first
        self._neighbours = Neighbours()
        self._log_lengths = np.empty(0, dtype=np.float64)  # by row
        self._overall = math.log1p(max_new_tokens / 2)
        self._num_observed = 0

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        texts = [text_of(task) for task in tasks]
        entries = [self._entries.get(digest(text)) for text in texts]
        unknown = [text for text, entry in zip(texts, entries, strict=True) if not _is_known(entry)]
        vectors = iter(self._embed(unknown) if unknown and self._entries else ())
        logs = [entry.log_length if _is_known(entry) else self._blend(entry, next(vectors, None)) for entry in entries]
        return [min(float(self._max_new_tokens), math.expm1(log)) for log in logs]

    def observe(self, task: Task, lengths: Sequence[int]) -> None:
        text = text_of(task)
        log_length = fmean(map(math.log1p, lengths))
        self._num_observed += 1
        self._overall += (log_length - self._overall) / min(self._num_observed, OVERALL_WINDOW)
        name = digest(text)
        entry = self._entries.get(name)
        if entry is None:
            self._remember(name, text, log_length)
            return
        self._entries.move_to_end(name)
        entry.num_observed += 1
        entry.log_length += (log_length - entry.log_length) * max(1 / entry.num_observed, LEAST_RATE)
        self._log_lengths[entry.row] = entry.log_length

    def due(self) -> Callable[[], object] | None:
        return None

    def adopt(self, fitted: object) -> None:
        raise TypeError("the history has nothing to fit")

    def __len__(self) -> int:
        return len(self._entries)

    def _remember(self, name: bytes, text: str, log_length: float) -> None:
        row = len(self._entries)
        if row == self._max_entries:
            _, oldest = self._entries.popitem(last=False)
            row = oldest.row
            self._neighbours.remove(row)
        if row == len(self._log_lengths):
            self._log_lengths = _doubled(self._log_lengths)
        self._log_lengths[row] = log_length
        self._neighbours.add(row, self._embed([text])[0])
        self._entries[name] = _Entry(row, log_length)

    def _blend(self, entry: _Entry | None, vector: Vector | None) -> float:
        """Mean of the own observations, the neighbours' and everybody's; without a vector there is only the last."""
        if vector is None:
            return self._overall
        rows, cosines = self._neighbours.nearest(vector, NUM_NEIGHBOURS)
        weights = np.maximum(cosines, 0.0).astype(np.float64) ** SHARPNESS
        logs = self._log_lengths[rows]
        if entry is not None:
            weights = np.where(rows == entry.row, 0.0, weights)
        own = OWN_WEIGHT * entry.num_observed if entry is not None else 0.0
        own_log = entry.log_length if entry is not None else 0.0
        total = float(weights @ logs) + own * own_log + PRIOR_WEIGHT * self._overall
        return total / (float(weights.sum()) + own + PRIOR_WEIGHT)


def _is_known(entry: _Entry | None) -> TypeGuard[_Entry]:
    return entry is not None and entry.num_observed >= KNOWN


def _doubled(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    larger = np.zeros(max(64, 2 * len(values)))
    larger[: len(values)] = values
    return larger
