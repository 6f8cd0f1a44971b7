"""Length prediction: response lengths before generation starts, and whether dispatch may trust them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from penstock.config import Config, LengthConfig
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.active_groups import DecisionLogger
from penstock.scheduler.decoding import DecodingLimits
from penstock.scheduler.dispatch import DispatchPolicy
from penstock.scheduler.length.classifier import ClassifierPredictor
from penstock.scheduler.length.embedding import embedding
from penstock.scheduler.length.history import HistoryPredictor
from penstock.scheduler.length.predictor import HeuristicPredictor, LengthPredictor, Limit
from penstock.scheduler.length.trust import Trust
from penstock.types import Task

Background = Callable[[Callable[[], object], Callable[[object], None]], None]
"""background(compute, use): run `compute` off the event loop, then `use(result)` on the event loop."""


class LengthPrediction:
    """Predictions for the policies `sjf` and `ljf`, and trust in lengths for them and for `probe`.

    The predictions depend only on the order of learned groups and fits. So a replay of a run's groups restores them.
    The correlation after a replay uses predictions made right before each group completed, not the predictions that
    ordered the groups. `perf_counter` serves only to report the cost of a prediction.
    """

    def __init__(self, config: Config, *, log_decision: DecisionLogger, background: Background) -> None:
        self._log_decision, self._background = log_decision, background
        settings, policy = config.scheduler.length, config.scheduler.dispatch.policy
        self._predictor: LengthPredictor | None = None
        if policy in ("sjf", "ljf"):
            decoding = DecodingLimits(config)
            self._predictor = length_predictor(
                settings, limit=decoding.max_episode_tokens, temperature=decoding.temperature
            )
        self._probes = policy == "probe"
        self.trust = Trust(settings)
        self._num_predicted, self._seconds = 0, 0.0
        self.trusted = True
        """Whether the dispatch policy orders by lengths."""

    def estimate(self, tasks: Sequence[Task]) -> Sequence[float | None]:
        """Return the expected response tokens per episode of each task; None without a predictor."""
        if self._predictor is None:
            return [None] * len(tasks)
        start = time.perf_counter()
        predicted = self._predictor.predict(tasks)
        self._seconds += time.perf_counter() - start
        self._num_predicted += len(tasks)
        return predicted

    def learn_group(self, group: ActiveGroup, lengths: Sequence[int]) -> bool:
        """Learn from a complete group. Returns True if `trusted` changed."""
        if self._probes and len(lengths) > 1:
            self.trust.add(lengths[0], fmean(lengths[1:]))
        if self._predictor is not None:
            self._learn(self._predictor, group.task, group.predicted_tokens, lengths, self._background)
        if self.trust.trusted == self.trusted:
            return False
        self.trusted = self.trust.trusted
        self._log_decision("trust", self.trust.reason, {"tau": self.trust.tau})
        return True

    def learn_lengths(self, completed: Iterable[tuple[Task, Sequence[int]]]) -> None:
        """Learn from groups of an earlier controller: pairs (task, response tokens of the members), in order."""
        if (predictor := self._predictor) is not None:
            for task, lengths in completed:
                self._learn(predictor, task, predictor.predict([task])[0], lengths, run_now)

    def _learn(
        self, predictor: LengthPredictor, task: Task, predicted: float, lengths: Sequence[int], background: Background
    ) -> None:
        predictor.observe(task, lengths)
        self.trust.add(predicted, fmean(lengths))
        if fit := predictor.due():
            background(fit, predictor.adopt)

    def arrange(self, policy: DispatchPolicy, *, preference: float) -> None:
        """Predict the lengths of waiting groups again, and pass trust and predictions to the dispatch policy."""
        policy.adapt(preference=preference, trusted=self.trusted)
        if self._predictor is None or not (pending := policy.pending()):
            return
        for group, tokens in zip(pending, self.estimate([group.task for group in pending]), strict=True):
            group.predicted_tokens = tokens or 0.0
        policy.revise({group.number: group.predicted_tokens for group in pending})

    def metrics(self) -> dict[str, float | None]:
        """Return the rank correlation, and the mean microseconds per prediction."""
        predict_us = self._seconds / self._num_predicted * 1e6 if self._num_predicted else None
        return {"length_tau": self.trust.tau, "length_predict_us": predict_us}


def run_now(compute: Callable[[], object], use: Callable[[object], None]) -> None:
    """Run `compute` at once: the `Background` of callers that may block."""
    use(compute())


def length_predictor(config: LengthConfig, *, limit: Limit, temperature: Callable[[Task], float]) -> LengthPredictor:
    """Return the predictor that `scheduler.length` configures. `limit`: the most tokens of an episode of a task.
    `temperature`: the sampling temperature of a task."""
    match config.predictor:
        case "heuristic":
            return HeuristicPredictor(limit=limit)
        case "classifier":
            return ClassifierPredictor(refit_every=config.refit_every, limit=limit, temperature=temperature)
        case "history":
            return HistoryPredictor(embed=embedding(config.embedding), max_entries=config.max_entries, limit=limit)
