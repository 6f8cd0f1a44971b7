"""One model's passes over samples on one rank, and what they run in."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from transformers import PreTrainedModel

from penstock.trainer.forward import Autocast, pass_cost, shares_prefixes
from penstock.trainer.packing import MicroBatch, TokenTable, micro_batches
from penstock.trainer.strategy import Strategy


class Passes:
    """The micro-batches of a model, and idle ones where its strategy needs them."""

    def __init__(
        self, model: PreTrainedModel, strategy: Strategy, *, max_tokens: int, share_prefixes: bool = True
    ) -> None:
        """`model` is not placed yet. `max_tokens`: padded tokens per pass. `share_prefixes`: compute a prompt once for
        all its siblings, where model and strategy allow it."""
        self._strategy, self._max_tokens = strategy, max_tokens
        self._share = share_prefixes and not strategy.is_sharded and shares_prefixes(model)
        self._cost, self.device = pass_cost(model, strategy.device), strategy.device

    def of(self, table: TokenTable) -> Iterator[MicroBatch]:
        """Every sample with a trained token exactly once."""
        made = micro_batches(table, self._max_tokens, self.device, share_prefixes=self._share, pass_cost=self._cost)
        return self._strategy.passes(made, self.device)


def autocast(device: torch.device, compute_dtype: torch.dtype) -> Autocast:
    """What passes run in whose weights are float32."""
    return partial(torch.autocast, device.type, torch.bfloat16, enabled=compute_dtype == torch.bfloat16)
