"""What a correct learner would not show: said aloud, since everything else would go on as if nothing were wrong."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.alarms import Alarms
from penstock.config import CanaryConfig


class Canaries:
    """Looks at every optimizer step's metrics; pure."""

    def __init__(self, config: CanaryConfig) -> None:
        self._config = config
        self._alarms = Alarms()

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Alarms that begin with this step."""
        self._alarms.update("another trainer", self._foreign(metrics))
        if metrics["kl_tokens"]:  # a step that compared nothing neither raises nor clears
            self._alarms.update("log-probability parity", self._parity(metrics))
        if metrics["tokens"]:
            self._alarms.update("effective sample size", self._sample_size(metrics))
        return self._alarms.take()

    def _foreign(self, metrics: Mapping[str, float]) -> str | None:
        tokens = metrics["tokens_masked_foreign"]
        if not tokens:
            return None
        return (
            f"{tokens:g} tokens were sampled by a policy_version above the one being trained, and left out: another "
            "trainer publishes to the same rollout servers, whose older versions cannot be told from this run's; give "
            "each run servers of its own"
        )

    def _parity(self, metrics: Mapping[str, float]) -> str | None:
        gap, bound, tokens = metrics["kl_engine_trainer"], self._config.max_parity_gap, metrics["kl_tokens"]
        if gap <= bound:
            return None
        return (
            f"engine and trainer differ by {gap:.3g} nats per token (largest {metrics['parity_gap_max']:.3g}, "
            f"threshold {bound:g}) over {tokens:g} tokens that one version sampled and computed again: a server serves "
            "other weights than it says, computes them differently (dtype, kernels), or reads other tokens"
        )

    def _sample_size(self, metrics: Mapping[str, float]) -> str | None:
        size, bound = metrics["ess"], self._config.min_ess
        if size >= bound:
            return None
        return (
            f"the importance weights leave {size:.0%} of the step's tokens (threshold {bound:.0%}): data are too far "
            "from the policy; lower scheduler.max_staleness or the learning rate"
        )
