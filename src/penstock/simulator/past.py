"""What the length predictor has seen of tasks before the run: `simulator.known_lengths`.

Earlier plays of the same tasks are told through `Scheduler.recall`, as a resumed run would: a block of tasks ahead of
the first of them that is admitted, so that no bound on their number is needed. Two plays each: the first teaches their
lengths, but finds a predictor that knows nothing; the second shows that it can be trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

from penstock.simulator.workload import Tasks, Workload
from penstock.types import Task

FIRST_ATTEMPT = 1 << 20
"""Of the earlier plays: no group of a run gets that far."""
NUM_AHEAD = 256
"""Tasks recalled at a time."""
NUM_PLAYS = 2
"""Of each task."""

Recall = Callable[[Iterable[tuple[Task, Sequence[int]]]], None]
Lengths = Callable[[Workload, int, int], Sequence[int]]
"""(workload, task index, number of the play) -> response tokens of the members."""


def other_answers(workload: Workload, index: int, play: int) -> Sequence[int]:
    """Other answers to the same prompt."""
    return workload.plan(index, FIRST_ATTEMPT + play).lengths


def true_mean(workload: Workload, index: int, play: int) -> Sequence[int]:
    """What the group will take, members alike."""
    return [round(fmean(workload.plan(index, 0).lengths))]


class Past:
    """Recalls the past of tasks in the order of their indexes."""

    def __init__(self, workload: Workload, tasks: Tasks, lengths: Lengths, recall: Recall) -> None:
        self._workload, self._tasks, self._lengths, self._recall = workload, tasks, lengths, recall
        self._next = 0

    def reach(self, index: int) -> None:
        """Task `index` is about to be admitted."""
        while index >= self._next:
            block = range(self._next, self._next + NUM_AHEAD)
            self._next = block.stop
            self._recall(self._plays(block))

    def _plays(self, indexes: Sequence[int]) -> Iterator[tuple[Task, Sequence[int]]]:
        for play in range(NUM_PLAYS):
            for index in indexes:
                if (task := self._tasks.task(index)) is not None:
                    yield task, self._lengths(self._workload, index, play)
