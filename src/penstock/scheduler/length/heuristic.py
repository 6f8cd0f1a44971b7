"""Length from prompt length and cue words, in the magnitude of what has been seen so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from penstock.scheduler.length.features import CUES, Features, features, text_of
from penstock.types import Task

BASE_TOKENS = 64.0
WINDOW = 64  # groups the magnitude remembers, roughly


def rule_of_thumb(found: Features) -> float:
    """Response tokens before calibration: longer questions have longer answers, and cue words count most."""
    tokens = BASE_TOKENS + 8.0 * math.sqrt(found.prompt_tokens) + 2.0 * found.num_digits + 2.0 * found.num_operators
    return tokens * math.prod(cue.factor for cue, hit in zip(CUES, found.cues, strict=True) if hit)


class HeuristicPredictor:
    """A fixed rule times a running ratio of real to predicted lengths; never more than `max_new_tokens`."""

    def __init__(self, *, max_new_tokens: int) -> None:
        self._max_new_tokens = float(max_new_tokens)
        self._num_observed = 0
        self._log_ratio = 0.0

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        return [self.calibrated(features(text_of(task))) for task in tasks]

    def calibrated(self, found: Features) -> float:
        return min(self._max_new_tokens, rule_of_thumb(found) * math.exp(self._log_ratio))

    def observe(self, task: Task, lengths: Sequence[int]) -> None:
        self.calibrate(features(text_of(task)), fmean(lengths))

    def calibrate(self, found: Features, tokens: float) -> None:
        """An answer took `tokens`."""
        self._num_observed += 1
        error = math.log(max(tokens, 1.0) / rule_of_thumb(found)) - self._log_ratio
        self._log_ratio += error / min(self._num_observed, WINDOW)

    def due(self) -> Callable[[], object] | None:
        return None

    def adopt(self, fitted: object) -> None:
        raise TypeError("the heuristic has nothing to fit")
