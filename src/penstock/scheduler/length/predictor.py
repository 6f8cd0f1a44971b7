"""The interface of length predictors, and the heuristic.

The heuristic takes the length from prompt length and cue words, and scales it to the observed lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Protocol

from penstock.scheduler.length.features import CUES, Features, features, text_of
from penstock.scheduler.running_mean import RunningMean
from penstock.types import Task

Limit = Callable[[Task], int]
"""Returns the most response tokens that an episode of a task may generate."""

BASE_TOKENS = 64.0
WINDOW = 64  # approximate number of groups in the running scale


class LengthPredictor(Protocol):
    """A predictor of response lengths. Deterministic: the same calls in the same order give the same predictions."""

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        """Return the expected response tokens per episode of each task."""

    def observe(self, task: Task, lengths: Sequence[int]) -> None:
        """Learn from a group: its members took `lengths` response tokens. `lengths` is not empty."""

    def due(self) -> Callable[[], object] | None:
        """Return a fit to compute if one is due, else None.

        The fit works on a copy and may run in another thread. The caller passes its result to `adopt`.
        """
        return None

    def adopt(self, fitted: object) -> None:
        """Predict with the result of a fit from now on."""
        raise TypeError(f"{type(self).__name__} has nothing to fit")


def rule_of_thumb(found: Features) -> float:
    """Return response tokens before calibration. Longer questions have longer answers, and cue words count most."""
    tokens = BASE_TOKENS + 8.0 * math.sqrt(found.prompt_tokens) + 2.0 * found.num_digits + 2.0 * found.num_operators
    return tokens * math.prod(cue.factor for cue, hit in zip(CUES, found.cues, strict=True) if hit)


class HeuristicPredictor(LengthPredictor):
    """A fixed rule times a running ratio of actual to predicted lengths, at most the task's limit. The ratio is that
    of the task's tag if the tag has been observed."""

    def __init__(self, *, limit: Limit) -> None:
        self._limit = limit
        self._overall, self._of_tag = RunningMean(), dict[str, RunningMean]()
        """Means of log(actual / rule of thumb)."""

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        return [min(float(self._limit(task)), self._expected(task)) for task in tasks]

    def _expected(self, task: Task) -> float:
        return rule_of_thumb(features(text_of(task))) * math.exp(self._of_tag.get(task.tag, self._overall).value)

    def observe(self, task: Task, lengths: Sequence[int]) -> None:
        log_ratio = math.log(max(fmean(lengths), 1.0) / rule_of_thumb(features(text_of(task))))
        for ratio in (self._overall, self._of_tag.setdefault(task.tag, RunningMean())):
            ratio.add(log_ratio, steps=WINDOW)
