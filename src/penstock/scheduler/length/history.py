"""History predictor: length from the earlier lengths of the same task and of similar tasks.

There is one entry per text, under the digest of the text. So different texts have different entries, even if their
vectors are almost equal. Lengths are averaged as logarithms, so a prediction is a geometric mean. If a task has few
observations, its prediction also averages its nearest neighbours and the mean of all tasks. Neighbours weigh less, the
less similar they are.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypeGuard

from penstock.scheduler.length.embedding import Embedding
from penstock.scheduler.length.features import digest, text_of
from penstock.scheduler.length.neighbours import Neighbours, Vector
from penstock.scheduler.length.predictor import LengthPredictor
from penstock.types import Task

NUM_NEIGHBOURS = 8
SHARPNESS = 4  # a neighbour with cosine c has weight c ** SHARPNESS
PRIOR_WEIGHT = 0.1  # weight of the mean of all tasks
OWN_WEIGHT = 4.0  # weight of each observation of the task itself, in the same unit
KNOWN = 4  # a task with this many observations is predicted without neighbours
LEAST_RATE = 0.25  # least weight of a task's latest observation: the policy changes, so old lengths count less
OVERALL_WINDOW = 1024  # approximate number of observations in the mean of all tasks


@dataclass(slots=True, eq=False)
class _Entry:
    log_length: float
    num_observed: int = 1


class HistoryPredictor(LengthPredictor):
    """A history of up to `max_entries` texts. A new text replaces the text that was not observed for longest."""

    def __init__(self, *, embed: Embedding, max_entries: int, max_new_tokens: int) -> None:
        self._embed, self._max_entries, self._max_new_tokens = embed, max_entries, max_new_tokens
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently observed first
        self._neighbours = Neighbours[_Entry]()
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
            if len(self._entries) == self._max_entries:
                _, oldest = self._entries.popitem(last=False)
                self._neighbours.remove(oldest)
            entry = _Entry(log_length)
            self._neighbours.add(entry, self._embed([text])[0])
            self._entries[name] = entry
            return
        self._entries.move_to_end(name)
        entry.num_observed += 1
        entry.log_length += (log_length - entry.log_length) * max(1 / entry.num_observed, LEAST_RATE)

    def __len__(self) -> int:
        return len(self._entries)

    def _blend(self, entry: _Entry | None, vector: Vector | None) -> float:
        """Return the weighted mean log length of the task, its neighbours and all tasks.

        Without `vector`, return the mean of all tasks.
        """
        if vector is None:
            return self._overall
        nearest, cosines = self._neighbours.nearest(vector, NUM_NEIGHBOURS)
        found = zip(nearest, cosines.tolist(), strict=True)
        neighbours = [(max(cosine, 0.0) ** SHARPNESS, each.log_length) for each, cosine in found if each is not entry]
        own, own_log = (OWN_WEIGHT * entry.num_observed, entry.log_length) if entry is not None else (0.0, 0.0)
        total = sum(weight * log for weight, log in neighbours) + own * own_log + PRIOR_WEIGHT * self._overall
        return float(total / (sum(weight for weight, _ in neighbours) + own + PRIOR_WEIGHT))


def _is_known(entry: _Entry | None) -> TypeGuard[_Entry]:
    return entry is not None and entry.num_observed >= KNOWN
