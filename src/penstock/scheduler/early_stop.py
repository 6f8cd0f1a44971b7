"""Early stop: training ends when the groups or the policy's entropy say that nothing more is learnt."""

from __future__ import annotations

from collections import Counter, deque

from penstock.config import EarlyStopConfig
from penstock.scheduler.filters import Dropped
from penstock.types import LearnerState

ALARM_SHARE = 0.1
"""Share of `early_stop.groups` that must have ended before there is an alarm."""


class EarlyStop:
    """A pure decider. It hears of every complete group and of every optimizer step."""

    def __init__(self, config: EarlyStopConfig | None) -> None:
        self._config = config
        self._groups: deque[Dropped | None] = deque()
        """Of the latest groups: the filter that dropped each, or None if all filters kept it."""
        self._dropped: Counter[Dropped | None] = Counter()
        """How often each is among them."""
        self._low_steps, self._last_entropy = 0, 0.0
        self._ended: str | None = None

    def observe_group(self, dropped: Dropped | None) -> None:
        """Count a complete group, which a filter dropped or all filters kept."""
        if self._config is None:
            return
        self._groups.append(dropped)
        self._dropped[dropped] += 1
        if len(self._groups) > self._config.groups:
            oldest = self._groups.popleft()
            self._dropped[oldest] -= 1
            if not self._dropped[oldest]:
                del self._dropped[oldest]

    def observe_step(self, learner: LearnerState) -> None:
        """Count an optimizer step."""
        if self._config is None:
            return
        self._last_entropy = learner.entropy
        self._low_steps = self._low_steps + 1 if learner.entropy < self._config.min_entropy else 0

    def end(self, reason: str) -> None:
        """End training for a reason that another decider found."""
        self._ended = self._ended or reason

    def reason(self) -> str | None:
        """Return why training should end; None if it should go on."""
        config = self._config
        if config is None or self._ended:
            return self._ended
        if len(self._groups) == config.groups and self._filters_too_much(config):
            return self._filtered
        if self._low_steps >= config.steps:
            return (
                f"the policy's entropy was below {config.min_entropy:g} nats per token in the latest {config.steps} "
                f"steps, now {self._last_entropy:.3g}"
            )
        return None

    def alarm(self) -> str | None:
        """Return the alarm about filtered groups; None if fewer were filtered, or too few are known."""
        config = self._config
        if config is None or len(self._groups) < ALARM_SHARE * config.groups or not self._filters_too_much(config):
            return None
        return (
            f"{self._filtered}. Change the task or its difficulty; training ends when {config.filtered_share:.0%} of "
            f"{config.groups} groups were filtered (scheduler.early_stop)"
        )

    @property
    def _num_filtered(self) -> int:
        return len(self._groups) - self._dropped[None]

    def _filters_too_much(self, config: EarlyStopConfig) -> bool:
        return self._num_filtered >= config.filtered_share * len(self._groups)

    @property
    def _filtered(self) -> str:
        commonest, count = max(((each, n) for each, n in self._dropped.items() if each), key=lambda pair: pair[1])
        return (
            f"{self._num_filtered} of the latest {len(self._groups)} groups were filtered, {count} of them by "
            f"{commonest.name} ({commonest.reason})"
        )
