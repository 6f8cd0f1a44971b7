"""When a run has become hopeless: group after group failed, was filtered, or the tasks have run out."""

from __future__ import annotations


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
        self._failed = self._filtered = 0

    def played(self) -> None:
        """A group was played to its end."""
        self._failed = 0

    def kept(self) -> None:
        """There was something to learn from a group."""
        self._filtered = 0

    def failed(self, error: str) -> Exception | None:
        """A group was given up."""
        self._failed += 1
        if self._failed < self.max_failed:
            return None
        return TooManyFailures(f"{self._failed} groups in a row failed; the last error was: {error}")

    def filtered(self, reason: str) -> Exception | None:
        """A group had nothing to learn from."""
        self._filtered += 1
        if self._filtered < self._max_filtered:
            return None
        return NothingToLearn(
            f"{self._filtered} groups in a row were filtered, the last because {reason}: the task is too hard or too "
            "easy for this policy. Warm-start it longer or shorter, change the task, or set "
            "scheduler.filter_equal_rewards=false or a larger scheduler.max_filtered_in_a_row"
        )
