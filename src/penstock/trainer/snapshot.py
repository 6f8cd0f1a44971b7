"""A policy that is not trained: what it thinks of the tokens that another is trained on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.trainer.forward import token_logprobs
from penstock.trainer.lora import merged_weights
from penstock.trainer.packing import MicroBatch
from penstock.trainer.shards import Saved, assign


class Snapshot:
    """As large as the policy itself."""

    def __init__(self, policy: PreTrainedModel) -> None:
        """`policy` is placed, and the snapshot's own from now on."""
        self.model = policy.requires_grad_(False).eval()

    def logprobs(self, micro: MicroBatch, *, temperature: float) -> Tensor:
        """Of the micro-batch's trained tokens, [N]."""
        with torch.no_grad():
            return token_logprobs(self.model, micro, temperature=temperature)[0]

    def renew(self, model: PreTrainedModel) -> None:
        """Become what `model` is now, adapters merged."""
        self.load_state_dict(merged_weights(model))

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by name."""
        return dict(self.model.named_parameters())

    def load_state_dict(self, weights: Mapping[str, Tensor | Saved]) -> None:
        """Become what was saved."""
        for name, parameter in self.model.named_parameters():
            assign(parameter, weights[name])
