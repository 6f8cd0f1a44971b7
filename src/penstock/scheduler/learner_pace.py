"""The learner's own timings: since when it waits, how long a call and a whole step take."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

PEAK_SHARE = 0.9
"""Share of the learner's highest rate that a micro-batch should reach."""
CALLS, FEWEST_CALLS = 64, 8
"""Number of latest calls in the fit, and the number below which there is none."""
STEPS = 8
"""Number of latest steps from which the time of a whole step is taken."""


class Call(NamedTuple):
    """One call of the learner, and its optimizer step and publication if they followed."""

    num_groups: int
    num_tokens: int
    """Prompt and response tokens of the groups."""
    step: bool
    seconds: float


class LearnerPace:
    """Timings of one learner. A call takes `a + b * groups` seconds; both numbers are fitted to the latest calls."""

    def __init__(self, *, groups_per_step: int, counts_steps: bool) -> None:
        """`counts_steps`: whether calls that end with an optimizer step are among the calls of the fit."""
        self._groups_per_step, self._counts_steps = groups_per_step, counts_steps
        self.idle_since: float | None = None
        """Time since which the learner waits for groups; None while it works."""
        self._began: tuple[float, int, int, bool] | None = None
        self.calls: deque[Call] = deque(maxlen=CALLS)
        """The latest calls."""
        self._fitted: deque[tuple[int, float]] = deque(maxlen=CALLS)
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS + 1)
        self.best_groups: int | None = None
        """Smallest number of groups per call at which the learner reaches `PEAK_SHARE` of its highest rate; None while
        this is unknown."""
        self.whole_step_s: float | None = None
        """Seconds in which the run makes and trains the groups of a whole step; None before two steps."""

    def begin_wait(self, now: float) -> None:
        """Record that the learner asks for groups."""
        self.idle_since = now
        if self._began is not None:
            since, num_groups, num_tokens, step = self._began
            self.calls.append(Call(num_groups, num_tokens, step, now - since))
            if num_groups and (self._counts_steps or not step):
                self._fitted.append((num_groups, now - since))
                self.best_groups = _best(self._fitted)
        self._began = None

    def end_wait(self, now: float, *, num_groups: int, num_tokens: int, step: bool) -> None:
        """Record that the learner got groups with this number of tokens."""
        self.idle_since, self._began = None, (now, num_groups, num_tokens, step)

    def complete_step(self, now: float, *, num_groups: int) -> None:
        """Record an optimizer step over this number of groups."""
        self._steps.append((now, num_groups))
        trained = sum(count for _, count in self._steps) - self._steps[0][1]
        if trained:
            self.whole_step_s = (now - self._steps[0][0]) / trained * self._groups_per_step


def _best(calls: deque[tuple[int, float]]) -> int | None:
    """Return n such that n / (a + b * n) is `PEAK_SHARE` of 1 / b, for the line a + b * n through `calls`."""
    count = len(calls)
    mean_groups, mean_s = sum(groups for groups, _ in calls) / count, sum(seconds for _, seconds in calls) / count
    spread = sum((groups - mean_groups) ** 2 for groups, _ in calls)
    if count < FEWEST_CALLS or not spread:
        return None
    per_group_s = sum((groups - mean_groups) * (seconds - mean_s) for groups, seconds in calls) / spread
    if per_group_s <= 0:
        return None
    call_s = max(mean_s - per_group_s * mean_groups, 0.0)
    return max(math.ceil(PEAK_SHARE / (1 - PEAK_SHARE) * call_s / per_group_s - 1e-9), 1)
