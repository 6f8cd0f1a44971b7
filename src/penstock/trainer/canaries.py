"""Alarms about the learner: signs of faults that do not stop a run and would otherwise go unnoticed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from penstock.alarms import Alarms
from penstock.config import CanaryConfig

WINDOW = 20
"""Optimizer steps over which the effective sample size is judged."""
RAISED_AT, CLEARED_AT = WINDOW // 2, WINDOW // 4
"""Numbers of low steps within the window: the alarm is raised at the first number and cleared at the second."""


class Canaries:
    """Checks of every optimizer step's metrics. They do no I/O."""

    def __init__(self, config: CanaryConfig) -> None:
        self._config = config
        self._alarms = Alarms()
        self._latest: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        """(step, effective sample size)."""
        self._is_low = False

    def look(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Return the alarms that begin with this step."""
        self._alarms.update("another trainer", self._foreign_tokens(metrics))
        if metrics["kl_tokens"]:  # a step without compared tokens changes no alarm
            self._alarms.update("log-probability parity", self._parity(metrics))
        if metrics["tokens"]:
            self._alarms.update("effective sample size", self._low_sample_size(step, metrics["ess"]))
        return self._alarms.take()

    def _foreign_tokens(self, metrics: Mapping[str, float]) -> str | None:
        if not (tokens := metrics["tokens_masked_foreign"]):
            return None
        return (
            f"{tokens:g} tokens were sampled by a policy_version above the one being trained, and left out: another "
            "trainer publishes to the same rollout servers, and its older versions cannot be distinguished from those "
            "of this run; give each run its own servers"
        )

    def _parity(self, metrics: Mapping[str, float]) -> str | None:
        gap, bound, tokens = metrics["kl_engine_trainer"], self._config.max_parity_gap, metrics["kl_tokens"]
        others = (gap * tokens - metrics["parity_gap_max"]) / max(tokens - 1, 1)
        if others <= bound:  # a single token with a large gap is no fault
            return None
        return (
            f"engine and trainer differ by {gap:.3g} nats per token (largest {metrics['parity_gap_max']:.3g}, "
            f"threshold {bound:g}) over {tokens:g} tokens that one version sampled and computed again: a "
            "server serves other weights than it reports, computes differently (dtype, kernels) or reads other tokens"
        )

    def _low_sample_size(self, step: int, size: float) -> str | None:
        """Return the reason for the alarm about an effective sample size that stays low.

        One token with a large ratio can make a single step low. The alarm is therefore raised only when half of a
        window's steps are low.
        """
        self._latest.append((step, size))
        bound = self._config.min_ess
        low = {at: each for at, each in self._latest if each < bound}
        self._is_low = len(low) > CLEARED_AT if self._is_low else len(low) >= RAISED_AT
        if not self._is_low:
            return None
        return (
            f"below {bound:.0%} in {len(low)} of the latest {len(self._latest)} steps, since step {min(low)} "
            f"(median of these {median(low.values()):.0%}, lowest {min(low.values()):.0%}): the data are too far from "
            "the policy; lower scheduler.max_staleness or trainer.learning_rate"
        )
