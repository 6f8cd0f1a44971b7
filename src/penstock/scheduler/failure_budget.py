"""Reasons to stop a run: too many groups in a row failed or were filtered, or the tasks are used up."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path

from penstock.alarms import Alarms, HopelessError
from penstock.config import Config
from penstock.config.environments import ATROPOS
from penstock.scheduler.filters import Dropped
from penstock.types import Task

NUM_REASONS = 5
"""Most reasons for dropping groups that one message lists."""
ALARM_SHARE = 0.1
"""Share of `max_filtered_in_a_row` from which on there is an alarm."""
LATEST_GROUPS = 100
"""Failures are counted among this many latest groups."""
MANY_FAILED = 25
"""Failures among the latest groups that raise an alarm. The alarm ends when fewer than half as many remain."""


class NothingToLearn(HopelessError):
    """Too many groups in a row were filtered; the message says what to change."""


class TooManyFailures(HopelessError):
    """Too many groups in a row failed in their environment; the message quotes the last error."""


class OutOfTasks(HopelessError):
    """The task source is used up, and too few groups are left for a batch."""


class FailureBudget:
    """Counts of failed and filtered groups in a row.

    `fail_group` and `filter_group` return the error that ends the run, or None.
    """

    max_failed = 20
    """Number of groups in a row that fail before the run ends."""

    def __init__(self, *, max_filtered: int, alarms: Alarms) -> None:
        self._max_filtered, self._alarms = max_filtered, alarms
        self._failed = 0
        self._dropped: Counter[Dropped] = Counter()
        """Number of groups dropped since the last kept group, by filter and reason."""
        self._failed_meanwhile = 0
        """Number of groups that failed since the last kept group."""
        self._latest: deque[bool] = deque(maxlen=LATEST_GROUPS)
        """Whether each of the latest groups failed."""
        self._latest_error = ""
        self._many_failed = False

    def complete_group(self) -> None:
        """Count a group that did not fail."""
        self._failed = 0
        self._count_ended(failed=False)

    def keep_group(self) -> None:
        """Count a group that all filters kept."""
        self._dropped.clear()
        self._failed_meanwhile = 0
        self._update_alarms()

    def fail_group(self, error: str, *, command: str | None) -> Exception | None:
        """Count a group that failed in all its attempts. `command` is a shell command that plays its task, or None."""
        self._failed += 1
        self._failed_meanwhile += 1
        self._latest_error = error
        self._count_ended(failed=True)
        if self._failed < self.max_failed:
            return None
        remedy = f"; `{command}` plays that task by itself" if command else ""
        return TooManyFailures(f"{self._failed} groups in a row failed; the last error was: {error}{remedy}")

    def filter_group(self, dropped: Dropped) -> Exception | None:
        """Count a group that a filter dropped."""
        self._dropped[dropped] += 1
        self._update_alarms()
        if self._dropped.total() < self._max_filtered:
            return None
        return NothingToLearn(
            f"{self._filtered_so_far}. The task is too hard or too easy for this policy, or the filter too strict: "
            "warm-start it longer or shorter, change the task, or set scheduler.group_filter=[] or a larger "
            "scheduler.max_filtered_in_a_row"
        )

    def _count_ended(self, *, failed: bool) -> None:
        self._latest.append(failed)
        enough = MANY_FAILED / 2 if self._many_failed else MANY_FAILED
        self._many_failed = sum(self._latest) >= enough
        self._update_alarms()

    def _update_alarms(self) -> None:
        self._alarms.update("failures", self.failure_alarm())
        self._alarms.update("filter", self.filter_alarm())

    def failure_alarm(self) -> str | None:
        """Return the alarm about failures among the latest groups; None if few groups failed."""
        if not self._many_failed:
            return None
        return (
            f"{sum(self._latest)} of the latest {len(self._latest)} groups failed: repair the environment, or remove "
            f"such tasks from the data; the last error was: {self._latest_error}"
        )

    def filter_alarm(self) -> str | None:
        """Return the alarm about filtered groups in a row; None if few groups were filtered."""
        if self._dropped.total() < ALARM_SHARE * self._max_filtered:
            return None
        return f"{self._filtered_so_far}; scheduler.max_filtered_in_a_row is {self._max_filtered}"

    @property
    def _filtered_so_far(self) -> str:
        commonest = self._dropped.most_common(NUM_REASONS)
        reasons = [f"{count} by {dropped.name} ({dropped.reason})" for dropped, count in commonest]
        if rest := self._dropped.total() - sum(count for _, count in commonest):
            reasons.append(f"{rest} for other reasons")
        filtered = f"{self._dropped.total()} groups in a row were filtered: {', '.join(reasons)}"
        if not self._failed_meanwhile:
            return filtered
        return f"{filtered}; {self._failed_meanwhile} more failed between them, the last with: {self._latest_error}"


def command_for(config: Config, task: Task) -> str | None:
    """Return the shell command that plays `task` as the run does; None if there is no such command."""
    if task.purpose == "eval" or config.run_id is None or config.env.name == ATROPOS:
        return None
    return f"penstock env try {Path(config.runs_dir, config.run_id, 'config.yaml')} --task {task.index}"
