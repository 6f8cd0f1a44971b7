"""Imitation of worked examples before the first rollout: RL has nothing to amplify in a policy that is never right.

Leaves no optimizer state behind; RL starts with a fresh one. Whatever becomes of the model then, here every rank holds
all of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedModel

from penstock.groups.batch import Batch
from penstock.ports import Demonstrations
from penstock.trainer.busy import BusyClock
from penstock.trainer.forward import pass_cost, token_logprobs
from penstock.trainer.optimizer import adamw
from penstock.trainer.packing import TokenTable, flatten, micro_batches
from penstock.trainer.ranks import Ranks
from penstock.trainer.strategy import Replicated

MAX_GRAD_NORM = 1.0
FLOOR = 0.05
"""The cosine ends at this share of the learning rate."""
TOKENS_PER_MICROBATCH = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """What the warm start did. `loss` is the mean negative log-likelihood per token of its last step."""

    steps: int
    seconds: float
    busy_s: float
    loss: float


Imitate = Callable[[Batch, float], dict[str, float]]
"""One optimizer step on a batch with a learning rate; `Imitation.step`, over all ranks."""


def warm_start(
    imitate: Imitate, demonstrations: Demonstrations, *, steps: int, batch_size: int, learning_rate: float
) -> WarmStart:
    """Train on batches drawn from `demonstrations`; the learning rate falls along a cosine."""
    examples, busy_s, loss = iter(demonstrations), 0.0, math.nan
    started = time.monotonic()
    for step in range(steps):
        done = imitate(_draw(examples, batch_size), learning_rate * _cosine(step / steps))
        busy_s, loss = busy_s + done["busy_s"], done["loss"]
        if not math.isfinite(loss):
            raise FloatingPointError(f"warm start: the loss of step {step + 1} is {loss}; lower its learning rate")
    return WarmStart(steps=steps, seconds=time.monotonic() - started, busy_s=busy_s, loss=loss)


class Imitation:
    """One rank's side: the model, trained in place, and its optimizer."""

    def __init__(self, model: PreTrainedModel, ranks: Ranks | None = None) -> None:
        """`model` is the same on all `ranks` (none: this one is alone)."""
        self._model, self._ranks = model, ranks or Ranks()
        self._strategy = Replicated(self._ranks, model.device)
        self._parameters = list(model.parameters())
        self._optimizer = adamw(self._parameters, learning_rate=0.0)
        self._device, self._pass_cost = self._parameters[0].device, pass_cost(model, model.device)
        self._busy = BusyClock(self._device)

    def step(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        """One optimizer step on this rank's part of a batch. `loss` and `busy_s` are this rank's share of what they are
        for the whole."""
        trained = flatten([np.asarray(mask, dtype=np.bool_) for mask in batch["loss_mask"]], np.bool_)
        table = TokenTable.build([np.asarray(ids, dtype=np.int64) for ids in batch["token_ids"]], trained)
        with self._busy:
            loss = self._backward(table)
            self._strategy.summed(self._parameters, in_place=True)
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            torch.nn.utils.clip_grad_norm_(self._parameters, MAX_GRAD_NORM, foreach=True)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "busy_s": self._busy.seconds / self._ranks.size}

    def _backward(self, table: TokenTable) -> float:
        """Cross entropy, over the trained tokens of the whole batch; gradients are added. Returns this rank's part."""
        (tokens,) = self._ranks.total([int(table.trained.sum())], "count tokens")
        num_tokens, total = max(int(tokens), 1), 0.0
        made = micro_batches(
            table, TOKENS_PER_MICROBATCH, self._device, share_prefixes=False, pass_cost=self._pass_cost
        )
        for micro in made:
            logprobs, _ = token_logprobs(self._model, micro, temperature=1.0)
            loss = -logprobs.sum() / num_tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total


def _draw(examples: Iterator[tuple[list[int], list[int]]], batch_size: int) -> Batch:
    batch = list(islice(examples, batch_size))
    if not batch:
        raise ValueError("warm start: the demonstrations ran out")
    return Batch(values={"token_ids": [ids for ids, _ in batch], "loss_mask": [mask for _, mask in batch]})


def _cosine(progress: float) -> float:
    return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * progress))
