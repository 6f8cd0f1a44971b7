"""What is known of lengths before anything is generated, from predictions or probes, and what the order makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from penstock.config import Config
from penstock.scheduler.dispatch import DispatchPolicy
from penstock.scheduler.length.estimator import LengthEstimator
from penstock.scheduler.length.predictor import length_predictor
from penstock.scheduler.length.trust import Trust
from penstock.scheduler.live import LiveGroup
from penstock.scheduler.segments import max_trained_tokens
from penstock.types import Task

Record = Callable[[str, str, Mapping[str, Any]], None]
"""Called as record(decider, reason, inputs) with every decision."""

Background = Callable[[Callable[[], object], Callable[[object], None]], None]
"""background(compute, use): runs `compute` elsewhere, and `use` with its result on the event loop."""


class Foresight:
    """Only the policies that order by predicted length pay for predictions; `probe` needs none."""

    def __init__(self, config: Config, groups: Mapping[int, LiveGroup], *, record: Record, background: Background):
        self._groups, self._record, self._background = groups, record, background
        settings, policy = config.scheduler.length, config.scheduler.dispatch.policy
        self._estimator = _estimator(config) if policy in ("sjf", "ljf") else None
        self._probes = policy == "probe"
        self._trust = self._estimator.trust if self._estimator else Trust(settings)
        self.trusted = True
        """What the dispatch policy has been told."""

    @property
    def reason(self) -> str:
        """Why lengths are trusted, or not."""
        return self._trust.reason

    def estimate(self, tasks: Sequence[Task]) -> list[float | None]:
        """Expected response tokens per episode of each task; None where nothing is predicted."""
        return list(self._estimator.estimate(tasks)) if self._estimator else [None] * len(tasks)

    def played(self, group: LiveGroup, lengths: Sequence[int]) -> bool:
        """Learn from a whole group; True if that changes whether lengths are trusted."""
        if self._probes and len(lengths) > 1:
            self._trust.add(lengths[0], fmean(lengths[1:]))
        if self._estimator is not None:
            self._estimator.finished(group.task, group.predicted_tokens, lengths)
            if fit := self._estimator.due():
                self._background(fit, self._estimator.adopt)
        if self._trust.trusted == self.trusted:
            return False
        self.trusted = self._trust.trusted
        self._record("trust", self.reason, {"tau": self._trust.tau})
        return True

    def arrange(self, policy: DispatchPolicy, *, preference: float) -> None:
        """Let the dispatch policy know what is known by now: what waits is predicted anew."""
        policy.adapt(preference=preference, trusted=self.trusted)
        if self._estimator is None or not (pending := policy.pending()):
            return
        tokens = self._estimator.estimate([waiting.task for waiting in pending])
        revised = {waiting.group: value for waiting, value in zip(pending, tokens, strict=True)}
        policy.revise(revised)
        for number, value in revised.items():
            if group := self._groups.get(number):
                group.predicted_tokens = value

    def recall(self, played: Iterable[tuple[Task, Sequence[int]]]) -> None:
        """Learn from groups that were played before."""
        if self._estimator is not None:
            self._estimator.replay(played)

    def metrics(self) -> dict[str, float | None]:
        """Rank correlation, and mean microseconds per prediction."""
        return {
            "length_tau": self._trust.tau,
            "length_predict_us": self._estimator.predict_us if self._estimator else None,
        }


def _estimator(config: Config) -> LengthEstimator:
    settings = config.scheduler.length
    predictor = length_predictor(
        settings, max_new_tokens=max_trained_tokens(config), temperature=config.env.temperature
    )
    return LengthEstimator(predictor, settings)
