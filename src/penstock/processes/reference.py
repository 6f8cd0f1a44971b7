"""One rank of the trainer's reference policy."""

from __future__ import annotations

from transformers import PreTrainedModel

from penstock.groups.batch import Batch
from penstock.groups.intent import PerRank
from penstock.groups.method import remote_method
from penstock.processes.rank import BesideActor
from penstock.trainer.reference import Reference


class ReferenceRank(BesideActor[Reference]):
    """Holds the policy as training began."""

    @remote_method(dispatch={"batch": PerRank()}, blocking=False)
    def logprobs(self, batch: Batch, policy_version: int) -> Batch:
        """See `Reference.logprobs`."""
        return self._held.logprobs(batch, policy_version)

    def _make(self, policy: PreTrainedModel) -> Reference:
        return Reference(
            policy,
            self._config.trainer,
            max_staleness=self._config.scheduler.max_staleness,
            temperature=self._config.env.temperature,
            compute_dtype=self._dtype,
            ranks=self._ranks,
        )
