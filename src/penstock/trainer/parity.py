"""Engine against trainer where one version computed both, also while all that is trained is older than the policy.

In a run whose learner is the bottleneck no sample of the version being trained ever arrives. Then, now and then, a copy
of the policy as it is published is kept until samples that it made come in.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from penstock.trainer.snapshot import Snapshot
from penstock.trainer.strategy import Strategy


class Parity:
    """Which version's samples are comparable, and with whose log-probabilities."""

    def __init__(self, model: PreTrainedModel, strategy: Strategy, *, every: int | None, max_staleness: int) -> None:
        """`every`: steps without a comparable token until a copy is made; None never makes one."""
        self._model, self._strategy = model, strategy
        self._every, self._max_staleness = every, max_staleness
        self.copy: Snapshot | None = None
        """Of the policy as of `_copied`; None while the policy itself is what compares."""
        self._copied = self._num_quiet = 0

    def version(self, policy_version: int) -> int:
        """The version whose samples are comparable while `policy_version` is trained."""
        return policy_version if self.copy is None else self._copied

    def forget(self) -> None:
        """The policy has gone back to a saved state: a copy of what came after belongs to nobody's version."""
        self.copy, self._num_quiet = None, 0

    def stepped(self, policy_version: int, *, num_compared: int) -> None:
        """A step that compared so many tokens has made the policy `policy_version`."""
        self._num_quiet = 0 if num_compared else self._num_quiet + 1
        if self.copy is not None and (num_compared or policy_version - self._copied > self._max_staleness):
            self.copy, self._num_quiet = None, 0
        if self.copy is None and self._every is not None and self._num_quiet >= self._every:
            self.copy, self._copied = Snapshot(self._strategy.copied(self._model)), policy_version
