"""Micro-batches of similar length, so that padding costs little.

Right padding needs no attention mask: under a causal mask no real token sees what lies to its right. Columns from the
last trained token on are not even fed: nothing is predicted there. No Python loop runs per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

PASS_COST_TOKENS = 256
"""What one more forward and backward pass costs beyond its tokens, in tokens; padding beyond that earns a cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """Samples laid end to end: S tokens of n samples."""

    token_ids: Ints  # [S]
    trained: npt.NDArray[np.bool_]  # [S], tokens that carry a loss
    starts: Ints  # [n], where each sample begins
    widths: Ints  # [n], columns to feed: those before the sample's last trained token

    @classmethod
    def build(cls, token_ids: Sequence[npt.ArrayLike], trained: npt.NDArray[np.bool_]) -> TokenTable:
        """From one array of ids per sample and the loss mask over all of them; a first token carries no loss."""
        lengths = np.asarray([np.size(ids) for ids in token_ids], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        trained = trained.copy()
        trained[starts[lengths > 0]] = False
        column = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        widths = np.zeros(len(lengths), dtype=np.int64)
        np.maximum.at(widths, np.repeat(np.arange(len(lengths)), lengths), np.where(trained, column, 0))
        return cls(token_ids=flatten(token_ids, np.int64), trained=trained, starts=starts, widths=widths)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """R padded rows of L columns, and the N trained tokens they predict."""

    inputs: Tensor  # [R, L] token ids
    rows: Tensor  # [N]
    columns: Tensor  # [N], where the logits of the token are: one before its own column
    chosen: Tensor  # [N] token ids
    tokens: Ints  # [N], index into the table
    samples: Ints  # [N], index of the sample


def flatten(arrays: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """One array of all entries in order."""
    return np.concatenate(arrays).astype(dtype, copy=False) if len(arrays) else np.zeros(0, dtype=dtype)


def micro_batches(table: TokenTable, max_tokens: int, device: torch.device) -> Iterator[MicroBatch]:
    """Every sample with a trained token exactly once, at most `max_tokens` padded tokens at a time."""
    trainable = np.flatnonzero(table.widths)
    for bucket in buckets(table.widths[trainable], max_tokens):
        yield _collate(table, trainable[bucket], device)


def buckets(widths: Ints, max_tokens: int) -> list[Ints]:
    """Indices grouped by width: rows * widest <= `max_tokens` in each group, unless a single row exceeds it.

    A group also ends where its padding would cost more than another pass.
    """
    order = np.argsort(widths, kind="stable")
    cuts, start, real = [], 0, 0
    for position, width in enumerate(widths[order].tolist()):
        padded = (position - start + 1) * width
        if position > start and (padded > max_tokens or padded - real - width > PASS_COST_TOKENS):
            cuts.append(position)
            start, real = position, 0
        real += width
    return [bucket for bucket in np.split(order, cuts) if len(bucket)]


def _collate(table: TokenTable, samples: Ints, device: torch.device) -> MicroBatch:
    width = int(table.widths[samples].max())
    offsets = np.arange(width + 1)
    grid = table.starts[samples][:, None] + offsets  # one column more than is fed: the last predicted token
    real = offsets <= table.widths[samples][:, None]
    grid[~real] = 0
    rows, targets = np.nonzero(table.trained[grid] & real)
    padded = np.where(real, table.token_ids[grid], 0)

    def tensor(array: Ints) -> Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        inputs=tensor(np.ascontiguousarray(padded[:, :width])),
        rows=tensor(rows),
        columns=tensor(targets - 1),
        chosen=tensor(padded[rows, targets]),
        tokens=grid[rows, targets],
        samples=samples[rows],
    )
