"""What every length predictor does, and the one that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.config import LengthConfig
from penstock.scheduler.length.classifier import ClassifierPredictor
from penstock.scheduler.length.embedding import embedding
from penstock.scheduler.length.heuristic import HeuristicPredictor
from penstock.scheduler.length.history import HistoryPredictor
from penstock.types import Task


class LengthPredictor(Protocol):
    """Deterministic: the same calls in the same order give the same predictions."""

    def predict(self, tasks: Sequence[Task]) -> list[float]:
        """Expected response tokens per episode."""
        ...

    def observe(self, task: Task, lengths: Sequence[int]) -> None:
        """The members of a group took `lengths` response tokens; at least one did."""
        ...

    def due(self) -> Callable[[], object] | None:
        """A fit to compute, if one is due. It works on a copy and may run in another thread; `adopt` its result."""
        ...

    def adopt(self, fitted: object) -> None:
        """Predict with what the fit found from now on."""
        ...


def length_predictor(config: LengthConfig, *, max_new_tokens: int, temperature: float) -> LengthPredictor:
    """The predictor of `scheduler.length`."""
    if config.predictor == "heuristic":
        return HeuristicPredictor(max_new_tokens=max_new_tokens)
    if config.predictor == "classifier":
        return ClassifierPredictor(
            refit_every=config.refit_every, max_new_tokens=max_new_tokens, temperature=temperature
        )
    return HistoryPredictor(
        embed=embedding(config.embedding), max_entries=config.max_entries, max_new_tokens=max_new_tokens
    )
