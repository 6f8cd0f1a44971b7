"""Imitation of worked examples before the first rollout: RL has nothing to amplify in a policy that is never right.

Leaves no optimizer state behind; RL starts with a fresh one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from transformers import PreTrainedModel

from penstock.ports import Demonstrations
from penstock.trainer.busy import BusyClock
from penstock.trainer.forward import pass_cost, token_logprobs
from penstock.trainer.optimizer import adamw
from penstock.trainer.packing import TokenTable, flatten, micro_batches

MAX_GRAD_NORM = 1.0
FLOOR = 0.05
"""The cosine ends at this share of the learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """What the warm start did. `loss` is the mean negative log-likelihood per token of its last step."""

    steps: int
    seconds: float
    busy_s: float
    loss: float


def warm_start(
    model: PreTrainedModel,
    demonstrations: Demonstrations,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    tokens_per_microbatch: int = 4096,
) -> WarmStart:
    """Train `model` in place on batches drawn from `demonstrations`; the learning rate falls along a cosine."""
    device = next(model.parameters()).device
    optimizer = adamw(model.parameters(), learning_rate=learning_rate)
    examples, busy, busy_s, loss = iter(demonstrations), BusyClock(device), 0.0, math.nan
    started = time.monotonic()
    for step in range(steps):
        table = _draw(examples, batch_size)
        with busy:
            loss = _backward(model, table, tokens_per_microbatch, device)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * _cosine(step / steps)
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM, foreach=True)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        busy_s += busy.seconds
        if not math.isfinite(loss):
            raise FloatingPointError(f"warm start: the loss of step {step + 1} is {loss}; lower its learning rate")
    return WarmStart(steps=steps, seconds=time.monotonic() - started, busy_s=busy_s, loss=loss)


def _draw(examples: Iterator[tuple[list[int], list[int]]], batch_size: int) -> TokenTable:
    batch = list(islice(examples, batch_size))
    if not batch:
        raise ValueError("warm start: the demonstrations ran out")
    trained = flatten([np.asarray(mask, dtype=np.bool_) for _, mask in batch], np.bool_)
    return TokenTable.build([np.asarray(ids, dtype=np.int64) for ids, _ in batch], trained)


def _backward(model: PreTrainedModel, table: TokenTable, tokens_per_microbatch: int, device: torch.device) -> float:
    """Cross entropy averaged over the batch's trained tokens; gradients are added. Returns the loss."""
    num_tokens, total = max(int(table.trained.sum()), 1), 0.0
    cost = pass_cost(model)
    for micro in micro_batches(table, tokens_per_microbatch, device, share_prefixes=False, pass_cost=cost):
        logprobs, _ = token_logprobs(model, micro, temperature=1.0)
        loss = -logprobs.sum() / num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def _cosine(progress: float) -> float:
    return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * progress))
