"""The tasks of a simulated run, and what the length predictor learns of them before the run.

With `simulator.known_lengths`, the simulator teaches earlier rollouts of the tasks to the predictor, as a resumed run
does. It teaches a block of tasks before the first of them is admitted, so that the number of tasks needs no bound. Each
task has two earlier rollouts. The first teaches the lengths to a predictor without data; the second shows that its
predictions can be trusted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean

from penstock.simulator.workload import Tasks, Workload
from penstock.types import Task

FIRST_ATTEMPT = 1 << 20
"""Attempt number of the earlier rollouts; larger than any attempt number of a run."""
NUM_AHEAD = 256
"""Number of tasks taught at a time."""
NUM_ROLLOUTS = 2
"""Number of earlier rollouts of each task."""

Rollouts = Iterable[tuple[Task, Sequence[int]]]
"""(task, response tokens of the members)"""


class AdmittedTasks:
    """A `TaskSource` that records when each task was requested, which is the time of its admission."""

    def __init__(
        self, workload: Workload, tasks: Tasks, *, known_lengths: str, learn_lengths: Callable[[Rollouts], None]
    ) -> None:
        self._workload, self._tasks = workload, tasks
        self._known_lengths, self._learn_lengths = known_lengths, learn_lengths
        self._num_taught = 0
        self.admitted_at: list[float] = []

    def task(self, index: int) -> Task | None:
        while self._known_lengths != "none" and index >= self._num_taught:
            self._learn_lengths(self._earlier_rollouts(range(self._num_taught, self._num_taught + NUM_AHEAD)))
            self._num_taught += NUM_AHEAD
        found = self._tasks.task(index)
        if found is not None:
            self.admitted_at.append(asyncio.get_running_loop().time())
        return found

    def _earlier_rollouts(self, indexes: Sequence[int]) -> Iterator[tuple[Task, Sequence[int]]]:
        for number in range(NUM_ROLLOUTS):
            for index in indexes:
                if (task := self._tasks.task(index)) is not None:
                    yield task, self._lengths(index, number)

    def _lengths(self, index: int, number: int) -> Sequence[int]:
        """Return the lengths of other answers to the prompt (`history`), or the mean length of the answers that the run
        will see (`oracle`)."""
        if self._known_lengths == "history":
            return self._workload.plan(index, FIRST_ATTEMPT + number).lengths
        return [round(fmean(self._workload.plan(index, 0).lengths))]
