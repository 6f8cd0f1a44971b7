"""The interface of length predictors, and the heuristic.

The heuristic takes the length from prompt length and cue words, and scales it to the observed lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Protocol

from penstock.scheduler.length.features import CUES, Features, features, text_of
from penstock.types import Task

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
    """A fixed rule times a running ratio of actual to predicted lengths. Predicts at most `max_new_tokens`."""

    def __init__(self, *, max_new_tokens: int) -> None:
        self._max_new_tokens = float(max_new_tokens)
        self._num_observed = 0
        self._log_ratio = 0.0

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        ratio = math.exp(self._log_ratio)
        return [min(self._max_new_tokens, rule_of_thumb(features(text_of(task))) * ratio) for task in tasks]

    def observe(self, task: Task, lengths: Sequence[int]) -> None:
        self._num_observed += 1
        error = math.log(max(fmean(lengths), 1.0) / rule_of_thumb(features(text_of(task)))) - self._log_ratio
        self._log_ratio += error / min(self._num_observed, WINDOW)
