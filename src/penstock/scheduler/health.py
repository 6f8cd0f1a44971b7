"""Metrics of the scheduler, and alarms about starving groups, length bias and stale work."""

from __future__ import annotations

from collections import deque

from penstock.alarms import Alarms
from penstock.config import Config
from penstock.scheduler.dispatcher import Dispatcher
from penstock.scheduler.length_prediction import LengthPrediction
from penstock.scheduler.supply import Supply
from penstock.scheduler.tuning import Tuning
from penstock.types import LearnerState

STARVED_S = 60.0
"""A group that has waited less is not starved, however short the other waits are."""
STALE_STEPS, FEWEST_STEPS = 20, 5
"""Latest optimizer steps over which stale work is judged, and how many there must be."""
MAX_STALE_SHARE = 0.1
"""Share of the tokens or samples of these steps that may be too old to train before an alarm is raised."""


class Health:
    """Metrics and alarms of the scheduler's parts. It changes only the alarms."""

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        supply: Supply,
        lengths: LengthPrediction,
        tuning: Tuning,
        alarms: Alarms,
    ) -> None:
        self._config, self._tuning, self._alarms = config, tuning, alarms
        self._work: deque[tuple[float, ...]] = deque(maxlen=STALE_STEPS)
        """Of each of the latest steps: tokens too old to train, tokens trained, samples trained, and ready episodes
        that became too old."""
        self._dispatcher, self._supply, self._lengths = dispatcher, supply, lengths

    def metrics(self) -> dict[str, float | None]:
        """Return the scheduler's metrics."""
        thresholds, supply = self._supply.thresholds, self._supply
        return {
            "oldest_wait_s": self._dispatcher.oldest_wait_s(),
            "groups_pending": float(len(self._dispatcher.policy)),
            "groups_in_flight": float(self._dispatcher.pacing_state.num_in_flight),
            "trigger_min_samples": float(thresholds.min_groups * self._config.env.group_size),
            "trigger_max_wait_s": thresholds.max_wait_s,
            "sjf_preference": supply.adjustment.preference,
            **({"searches_cpu_s": self._tuning.state.searches_cpu_s} if self._tuning.is_on else {}),
            **supply.bias.report(),
            **self._lengths.metrics(),
        }

    def check_step(self, learner: LearnerState, *, num_aged: int) -> None:
        """Update the alarms after an optimizer step. It made `num_aged` ready episodes too old to train."""
        wait_s, bound_s = self._dispatcher.oldest_wait_s(), self._dispatcher.policy.max_wait_s
        starved = (
            f"a group has waited {wait_s:.0f} s to start, more than twice scheduler.dispatch.max_wait, {bound_s:.4g} s"
        )
        self._alarms.update("starvation", starved if wait_s > max(2 * bound_s, STARVED_S) else None)
        self._alarms.update("length bias", self._supply.bias.check_step())
        self._alarms.update("length prediction", self._lengths.trust.alarm)
        self._alarms.update("stale work", self._stale_work(learner, num_aged))

    def _stale_work(self, learner: LearnerState, num_aged: int) -> str | None:
        """Return the alarm about work that the latest steps could not train; None if it was little."""
        names = ("tokens_masked_stale", "tokens", "samples")
        self._work.append((*(learner.metrics.get(name, 0.0) for name in names), num_aged))
        masked, trained, samples, aged = (sum(each) for each in zip(*self._work, strict=True))
        share = masked / max(masked + trained, 1.0)
        if len(self._work) < FEWEST_STEPS or (share <= MAX_STALE_SHARE and aged <= MAX_STALE_SHARE * samples):
            return None
        return (
            f"{share:.0%} of the tokens of the latest {len(self._work)} steps and {aged:g} ready episodes were too old "
            f"to train: {self._supply.remedy_for_stale_work}"
        )
