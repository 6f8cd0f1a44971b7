"""Predictions, what they cost, and how well they rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from penstock.config import LengthConfig
from penstock.scheduler.length.predictor import LengthPredictor
from penstock.scheduler.length.trust import Trust
from penstock.types import Task


class LengthEstimator:
    """A predictor that is judged by every finished group, and distrusted while its ranking is worthless.

    What it predicts depends only on the order of `finished` and `adopt`, so replaying the finished groups of a run
    brings that back; the correlation is then that of predictions made right before each group, not of those that
    ordered it. `perf_counter` is read to report the cost of a prediction, and for nothing else.
    """

    def __init__(self, predictor: LengthPredictor, config: LengthConfig) -> None:
        self._predictor = predictor
        self.trust = Trust(config)
        self._num_predicted, self._seconds = 0, 0.0

    def estimate(self, tasks: Sequence[Task]) -> list[float]:
        """Expected response tokens per episode of each task."""
        start = time.perf_counter()
        predicted = self._predictor.predict(tasks)
        self._seconds += time.perf_counter() - start
        self._num_predicted += len(tasks)
        return predicted

    def finished(self, task: Task, predicted_tokens: float, lengths: Sequence[int]) -> None:
        """A group of `task`, for which `predicted_tokens` was estimated, took `lengths` response tokens."""
        if not lengths:
            return
        self._predictor.observe(task, lengths)
        self.trust.add(predicted_tokens, fmean(lengths))

    def replay(self, pairs: Iterable[tuple[Task, Sequence[int]]]) -> None:
        """Live through the finished groups of a run again, in their order: predict, observe, fit when due."""
        for task, lengths in pairs:
            self.finished(task, self._predictor.predict([task])[0], lengths)
            fit = self.due()
            if fit is not None:
                self.adopt(fit())

    def due(self) -> Callable[[], object] | None:
        """A fit to compute, if one is due, in whatever thread; give its result to `adopt`."""
        return self._predictor.due()

    def adopt(self, fitted: object) -> None:
        self._predictor.adopt(fitted)

    @property
    def predict_us(self) -> float | None:
        """Mean microseconds per predicted task."""
        return self._seconds / self._num_predicted * 1e6 if self._num_predicted else None
