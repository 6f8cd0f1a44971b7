"""One rank of the trainer's critic."""

from __future__ import annotations

from transformers import PreTrainedModel

from penstock.groups.batch import Batch
from penstock.groups.collect import first
from penstock.groups.intent import PerRank
from penstock.groups.method import remote_method
from penstock.groups.modes import Mode
from penstock.processes.rank import BesideActor
from penstock.trainer.critic import Critic


class CriticRank(BesideActor[Critic]):
    """Holds the value function."""

    @remote_method(Mode.DP_COMPUTE, blocking=False)
    def values(self, batch: Batch) -> Batch:
        """See `Critic.values`."""
        return self._held.values(batch)

    @remote_method(dispatch={"batch": PerRank()}, blocking=False)
    def learn(self, batch: Batch, policy_version: int) -> None:
        """See `Critic.learn`."""
        self._held.learn(batch, policy_version)

    @remote_method(collect=first, blocking=False)
    def step(self) -> dict[str, float]:
        """See `Critic.step`."""
        return self._held.step()

    def _make(self, policy: PreTrainedModel) -> Critic:
        return Critic(
            policy,
            self._config.trainer,
            max_staleness=self._config.scheduler.max_staleness,
            compute_dtype=self._dtype,
            ranks=self._ranks,
        )
