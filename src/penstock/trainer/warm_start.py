"""The warm start: imitation of worked examples before the first rollout.

RL cannot improve a policy that never succeeds. The warm start keeps no optimizer state; RL starts with a fresh
optimizer. Every rank holds a full replica during the warm start, even if RL shards the model later.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import islice

import numpy as np
from transformers import PreTrainedModel

from penstock.config import ConfigError
from penstock.groups.batch import Batch
from penstock.ports.environment import Demonstrations
from penstock.trainer.forward import token_logprobs
from penstock.trainer.model_role import Passes
from penstock.trainer.optimizer import adamw, take_step
from penstock.trainer.packing import TokenTable, flatten
from penstock.trainer.ranks import Ranks
from penstock.trainer.strategy import Strategy

MAX_GRAD_NORM = 1.0
FLOOR = 0.05
"""Fraction of the learning rate at which the cosine schedule ends."""
TOKENS_PER_MICROBATCH = 4096

Imitate = Callable[[Batch, float], Mapping[str, float]]
"""Takes one optimizer step on a batch with a learning rate: `Imitation.step` over all ranks."""


def warm_start(
    imitate: Imitate, demonstrations: Callable[[], Demonstrations], *, steps: int, batch_size: int, learning_rate: float
) -> dict[str, float]:
    """Train on batches of demonstrations, with a cosine learning-rate schedule. `demonstrations` yields each of them
    once, and is called again when they are used up.

    Returns `steps`, `seconds`, and `loss`: the mean negative log-likelihood per token of the last step. Raises
    FloatingPointError if the loss is not finite, and ConfigError if there are no demonstrations.
    """
    examples, loss, start = _repeated(demonstrations), math.nan, time.monotonic()
    for step in range(steps):
        cosine = 0.5 * (1.0 + math.cos(math.pi * (step / steps)))
        loss = imitate(_draw(examples, batch_size), learning_rate * (FLOOR + (1.0 - FLOOR) * cosine))["loss"]
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"warm start: the loss is {loss} in step {step + 1}: lower model.warm_start.learning_rate"
            )
    return {"steps": steps, "seconds": time.monotonic() - start, "loss": loss}


class Imitation:
    """One rank's part of the warm start: the model, trained in place, and its optimizer."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks | None = None) -> None:
        """`model` is equal on all `ranks`. `ranks` is None if this is the only rank."""
        self._model, self._ranks = model, ranks or Ranks()
        self._strategy = Strategy(self._ranks, model.device)
        self._passes = Passes(model, self._strategy, max_tokens=TOKENS_PER_MICROBATCH, share_prefixes=False)
        self._parameters = list(model.parameters())
        self._optimizer = adamw(self._parameters)

    def step(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        """Take one optimizer step on this rank's part of a batch. The loss is the cross entropy, a mean over the
        trained tokens of the whole batch.

        Returns this rank's part of the `loss`; the sum over ranks is the loss of the whole batch.
        """
        table = TokenTable.build(batch["token_ids"], flatten(batch["loss_mask"], np.bool_))
        (tokens,) = self._ranks.total([int(table.trained.sum())], "count tokens")
        num_tokens, total = max(int(tokens), 1), 0.0
        for micro in self._passes.of(table):
            logprobs, _ = token_logprobs(self._model, micro)
            loss = -logprobs.sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        self._strategy.summed(self._parameters, in_place=True)
        take_step(self._optimizer, learning_rate=learning_rate, max_grad_norm=MAX_GRAD_NORM)
        return {"loss": total}


def _repeated(demonstrations: Callable[[], Demonstrations]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield all demonstrations again and again; nothing if there are none."""
    found = True
    while found:
        found = False
        for example in demonstrations():
            found = True
            yield example


def _draw(examples: Iterator[tuple[list[int], list[int]]], batch_size: int) -> Batch:
    batch = list(islice(examples, batch_size))
    if not batch:
        raise ConfigError(
            "model.warm_start: there is no task to demonstrate: give the run more data, or set steps to 0"
        )
    return Batch(values={"token_ids": [ids for ids, _ in batch], "loss_mask": [mask for _, mask in batch]})
