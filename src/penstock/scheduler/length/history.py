"""History predictor: length from the earlier lengths of the same task and of similar tasks.

There is one entry per tag and text, under their digest. So different texts have different entries, even if their
vectors are almost equal. Lengths are averaged as logarithms, so a prediction is a geometric mean. If a task has few
observations, its prediction also averages its nearest neighbours of the same tag and the mean of the tag. Neighbours
weigh less, the less similar they are.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeGuard

from penstock.scheduler.length.embedding import Embedding
from penstock.scheduler.length.features import digest, text_of
from penstock.scheduler.length.neighbours import Neighbours, Vector
from penstock.scheduler.length.predictor import LengthPredictor, Limit
from penstock.scheduler.running_mean import RunningMean
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
    tag: str
    log_length: float
    num_observed: int = 1


@dataclass(slots=True)
class _Tag:
    """The texts of one tag, and the mean log length of all its observations."""

    neighbours: Neighbours[_Entry] = field(default_factory=Neighbours)
    mean: RunningMean = field(default_factory=RunningMean)


class HistoryPredictor(LengthPredictor):
    """A history of up to `max_entries` texts. A new text replaces the text that was not observed for longest."""

    def __init__(self, *, embed: Embedding, max_entries: int, limit: Limit) -> None:
        self._embed, self._max_entries, self._limit = embed, max_entries, limit
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently observed first
        self._tags: dict[str, _Tag] = {}

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        texts = [text_of(task) for task in tasks]
        entries = [self._entries.get(_name(task, text)) for task, text in zip(tasks, texts, strict=True)]
        unknown = [
            text
            for task, text, entry in zip(tasks, texts, entries, strict=True)
            if not _is_known(entry) and task.tag in self._tags
        ]
        vectors = iter(self._embed(unknown) if unknown else ())
        logs = [
            entry.log_length if _is_known(entry) else self._blend(task, entry, vectors)
            for task, entry in zip(tasks, entries, strict=True)
        ]
        return [min(float(self._limit(task)), math.expm1(log)) for task, log in zip(tasks, logs, strict=True)]

    def observe(self, task: Task, lengths: Sequence[int]) -> None:
        log_length, text = fmean(map(math.log1p, lengths)), text_of(task)
        tag, name = self._tags.setdefault(task.tag, _Tag()), _name(task, text)
        tag.mean.add(log_length, steps=OVERALL_WINDOW)
        entry = self._entries.get(name)
        if entry is None:
            if len(self._entries) == self._max_entries:
                _, oldest = self._entries.popitem(last=False)
                self._tags[oldest.tag].neighbours.remove(oldest)
            entry = _Entry(task.tag, log_length)
            tag.neighbours.add(entry, self._embed([text])[0])
            self._entries[name] = entry
            return
        self._entries.move_to_end(name)
        entry.num_observed += 1
        entry.log_length += (log_length - entry.log_length) * max(1 / entry.num_observed, LEAST_RATE)

    def __len__(self) -> int:
        return len(self._entries)

    def _blend(self, task: Task, entry: _Entry | None, vectors: Iterator[Vector]) -> float:
        """Return the weighted mean log length of the task, its neighbours and all tasks of its tag. For a tag without
        observations, return half the task's limit."""
        tag = self._tags.get(task.tag)
        if tag is None:
            return math.log1p(self._limit(task) / 2)
        nearest, cosines = tag.neighbours.nearest(next(vectors), NUM_NEIGHBOURS)
        found = zip(nearest, cosines.tolist(), strict=True)
        neighbours = [(max(cosine, 0.0) ** SHARPNESS, each.log_length) for each, cosine in found if each is not entry]
        own, own_log = (OWN_WEIGHT * entry.num_observed, entry.log_length) if entry is not None else (0.0, 0.0)
        total = sum(weight * log for weight, log in neighbours) + own * own_log + PRIOR_WEIGHT * tag.mean.value
        return float(total / (sum(weight for weight, _ in neighbours) + own + PRIOR_WEIGHT))


def _name(task: Task, text: str) -> bytes:
    return digest(f"{task.tag}\n{text}")


def _is_known(entry: _Entry | None) -> TypeGuard[_Entry]:
    return entry is not None and entry.num_observed >= KNOWN
