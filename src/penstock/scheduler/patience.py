"""When a run has become hopeless: group after group failed, was filtered, or the tasks have run out."""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path

from penstock.config import Config
from penstock.config.atropos import ATROPOS
from penstock.scheduler.filters import Dropped
from penstock.types import Task

NUM_REASONS = 5
"""For which groups were dropped, that a message names."""
WORTH_TELLING = 0.1
"""Of the filtered groups in a row that end a run: then it is worth an alarm."""


LATEST_GROUPS = 100
MANY_FAILED = 25
"""Of the latest groups: then it is worth an alarm, which stands until there are half as many."""


class NothingToLearn(RuntimeError):
    """Group after group was filtered; the message says what to change."""

    self_explanatory = True
    hopeless = True


class TooManyFailures(RuntimeError):
    """Group after group failed in its environment; the message quotes the last error."""

    self_explanatory = True
    hopeless = True


class OutOfTasks(RuntimeError):
    """The task source is used up, and no batch can become whole any more."""

    self_explanatory = True
    hopeless = True


class Patience:
    """Counts failed and filtered groups in a row; each method returns why to give up, or None."""

    max_failed = 20
    """Groups in a row that may fail before the run does."""

    def __init__(self, *, max_filtered: int) -> None:
        self._max_filtered = max_filtered
        self._failed = 0
        self._dropped: Counter[Dropped] = Counter()
        self._failed_meanwhile = 0
        """Both since the last group that was kept."""
        self._latest: deque[bool] = deque(maxlen=LATEST_GROUPS)
        """Whether each of them failed."""
        self._latest_error = ""
        self._many_failed = False

    def played(self) -> None:
        """A group was played to its end."""
        self._failed = 0
        self._ended(failed=False)

    def kept(self) -> None:
        """There was something to learn from a group."""
        self._dropped.clear()
        self._failed_meanwhile = 0

    def failed(self, error: str, *, command: str | None) -> Exception | None:
        """A group was given up. `command`: plays its task by itself, if that can be."""
        self._failed += 1
        self._failed_meanwhile += 1
        self._latest_error = error
        self._ended(failed=True)
        if self._failed < self.max_failed:
            return None
        remedy = f"; `{command}` plays that task by itself" if command else ""
        return TooManyFailures(f"{self._failed} groups in a row failed; the last error was: {error}{remedy}")

    def filtered(self, dropped: Dropped) -> Exception | None:
        """A group was dropped by a filter."""
        self._dropped[dropped] += 1
        if self._dropped.total() < self._max_filtered:
            return None
        return NothingToLearn(
            f"{self._filtered_so_far}. The task is too hard or too easy for this policy, or the filter too strict: "
            "warm-start it longer or shorter, change the task, or set scheduler.group_filter=[] or a larger "
            "scheduler.max_filtered_in_a_row"
        )

    def _ended(self, *, failed: bool) -> None:
        self._latest.append(failed)
        enough = MANY_FAILED / 2 if self._many_failed else MANY_FAILED
        self._many_failed = sum(self._latest) >= enough

    def failure_alarm(self) -> str | None:
        """Many groups fail, though others between them are played."""
        if not self._many_failed:
            return None
        return (
            f"{sum(self._latest)} of the latest {len(self._latest)} groups failed: mend the environment, or take such "
            f"tasks out of the data; the last error was: {self._latest_error}"
        )

    def alarm(self) -> str | None:
        """What will end a run that trains if it goes on, and is worth knowing of another."""
        if self._dropped.total() < WORTH_TELLING * self._max_filtered:
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
    """What plays a task of a run as the run does, in the terminal; None if nothing can."""
    if task.purpose == "eval" or config.run_id is None or config.env.name == ATROPOS:
        return None
    return f"penstock env try {Path(config.runs_dir, config.run_id, 'config.yaml')} --task {task.index}"
