"""Evaluation groups: one per held-out task. They have their own ledger, and a caller awaits their results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.active_groups import ActiveGroups
from penstock.scheduler.wakeup import Progress, Signal
from penstock.types import EpisodeState, EpisodeSummary, Summaries, Task


class Evaluations:
    """Evaluation groups that run beside training. They do not count in the staleness budget or the training ledger."""

    def __init__(self, groups: ActiveGroups, *, progress: Progress, runnable: Signal) -> None:
        self.ledger = groups.evaluation_ledger
        self._groups, self._progress, self._runnable = groups, progress, runnable
        self._evaluated = progress.signal("evaluation", resource="its episodes", holder="the environment workers")
        self._num_requested = self._num_ended = 0
        """Number of groups to evaluate, and of those that have ended. Both restart at 0 once all have ended."""

    async def evaluate_tasks(self, tasks: Sequence[Task], *, num_samples: int = 1) -> list[Summaries]:
        """Play each task `num_samples` times. Returns the episodes of each task, failed episodes included."""
        if self._num_ended == self._num_requested:
            self._num_requested = self._num_ended = 0
        self._num_requested += len(tasks)
        results = [self._add_group(task, num_samples) for task in tasks]
        self._progress.changed(self._runnable)
        for result in results:
            while not result.done():
                self._evaluated.clear()
                await self._progress.wait(self._evaluated)
        return [result.result() for result in results]

    def _add_group(self, task: Task, size: int) -> asyncio.Future[Summaries]:
        group = self._groups.admit_group(task, "evaluation", size)
        group.result = asyncio.get_running_loop().create_future()
        return group.result

    def finish_group(self, group: ActiveGroup) -> None:
        """Deliver the summaries of a complete group. Its episodes end as TRAINED, although no trainer uses them."""
        for state in (EpisodeState.TRAINING, EpisodeState.TRAINED):
            group.move_members(range(group.size), state)
        self._deliver(group, group.summaries)

    def fail_group(self, group: ActiveGroup, error: str) -> None:
        """Deliver failed summaries for a group that failed too often."""
        episodes = [group.episode_id(member) for member in range(group.size)]
        self._deliver(group, [EpisodeSummary(episode=each, status="failed", error=error) for each in episodes])

    def _deliver(self, group: ActiveGroup, summaries: Summaries) -> None:
        assert group.result is not None
        group.result.set_result(summaries)
        self._num_ended += 1
        ended, requested = self._num_ended, self._num_requested
        inputs = {"group": group.number, "held_out_ended": ended, "held_out": requested}
        self._groups.log_decision("evaluation", f"{ended} of {requested} held-out tasks have ended", inputs)
        self._progress.changed(self._evaluated)

    def clear(self) -> None:
        """Reset the counts of groups."""
        self._num_requested = self._num_ended = 0
