"""Copies of a policy that are not trained and only compute log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.trainer.forward import token_logprobs
from penstock.trainer.lora import merged_weights
from penstock.trainer.packing import MicroBatch
from penstock.trainer.shards import load_parameters
from penstock.trainer.strategy import Strategy


class Snapshot:
    """A frozen policy. It is as large as the trained policy."""

    def __init__(self, policy: PreTrainedModel) -> None:
        """`policy` is placed already. The snapshot takes ownership of it."""
        self.model = policy.requires_grad_(False).eval()

    def logprobs(self, micro: MicroBatch, *, temperature: float) -> Tensor:
        """Return the log-probabilities of the micro-batch's trained tokens, [N]."""
        with torch.no_grad():
            return token_logprobs(self.model, micro, temperature=temperature)[0]

    def renew(self, model: PreTrainedModel) -> None:
        """Copy the present weights of `model`, adapters merged."""
        load_parameters(self.model, merged_weights(model))


class Parity:
    """Selects the tokens that compare engine and trainer: both must compute them with the same version.

    In a run limited by the learner, no sample of the version being trained ever arrives. The learner then keeps, from
    time to time, a copy of the published policy until samples of that version arrive.
    """

    def __init__(self, model: PreTrainedModel, strategy: Strategy, *, every: int | None, max_staleness: int) -> None:
        """`every`: number of steps without a comparable token after which a copy is made; None: never."""
        self._model, self._strategy = model, strategy
        self._every, self._max_staleness = every, max_staleness
        self.copy: Snapshot | None = None
        """Copy of the policy at version `_copied`; None while the policy itself is compared."""
        self._copied = self._num_quiet = 0

    def version(self, policy_version: int) -> int:
        """Return the version with comparable samples while `policy_version` is trained."""
        return policy_version if self.copy is None else self._copied

    def forget(self) -> None:
        """Drop the copy after the policy was restored from a saved state: its version no longer exists."""
        self.copy, self._num_quiet = None, 0

    def stepped(self, policy_version: int, *, num_compared: int) -> None:
        """Record a step that made `policy_version` and compared `num_compared` tokens. Drop or make a copy if due."""
        self._num_quiet = 0 if num_compared else self._num_quiet + 1
        if self.copy is not None and (num_compared or policy_version - self._copied > self._max_staleness):
            self.copy, self._num_quiet = None, 0
        if self.copy is None and self._every is not None and self._num_quiet >= self._every:
            self.copy, self._copied = Snapshot(self._strategy.copied(self._model)), policy_version
