"""The reference policy: the policy at the start of training. A KL penalty keeps the trained policy near it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from penstock.groups.batch import Batch
from penstock.trainer.forward import token_logprobs
from penstock.trainer.model_role import ModelRole
from penstock.trainer.packing import MicroBatch
from penstock.trainer.shards import load_parameters, read_state

NAME = "reference"
"""Name of the reference's files in a checkpoint, and of the column that it computes."""


class Reference(ModelRole):
    """One rank's reference policy. It is as large as the policy and never trained."""

    is_trained = False

    def _place(self, model: PreTrainedModel) -> None:
        self._strategy.place(model.requires_grad_(False))
        self._model = model.eval()

    def logprobs(self, batch: Batch, policy_version: int) -> Batch:
        """Return log-probabilities of the tokens that are in the loss while `policy_version` is trained.

        They form the column `reference`, with one array per sample, and 0 at other tokens.
        """
        in_loss = self._masks(batch, policy_version).in_loss
        return Batch(values={NAME: self._computed(batch, in_loss, self._logprobs_of)})

    def write(self, directory: Path) -> None:
        state = {"model": dict(self._model.named_parameters())}
        self._save(state, lambda copied: self._write_state(copied, directory, NAME))

    def read(self, directory: Path) -> None:
        self._await_copy()
        load_parameters(self._model, read_state(directory, NAME)["model"])

    def _modules(self) -> Sequence[Module]:
        return [self._model]

    def _logprobs_of(self, micro: MicroBatch) -> Tensor:
        """Return the log-probabilities of the micro-batch's trained tokens, [N]."""
        return token_logprobs(self._model, micro)[0]
