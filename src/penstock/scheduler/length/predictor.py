"""The interface of length predictors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.types import Task


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
