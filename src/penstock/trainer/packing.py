"""Micro-batches that waste little: rows of similar length, and a prompt that siblings share computed once.

Right padding needs no attention mask: under a causal mask no real token sees what lies to its right. Columns from the
last trained token on are not even fed: nothing is predicted there. No Python loop runs per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.trainer.buckets import PASS_COST_TOKENS, Bucket, Ints, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """Samples laid end to end: S tokens of n samples."""

    token_ids: Ints  # [S]
    trained: npt.NDArray[np.bool_]  # [S], tokens that carry a loss
    starts: Ints  # [n], where each sample begins
    widths: Ints  # [n], columns to feed: those before the sample's last trained token; 0 if it has none
    prefix_widths: Ints  # [n], columns before the one that predicts the first trained token
    prefix_ids: Ints  # [n], equal for samples whose prefixes are equal

    @classmethod
    def build(cls, token_ids: Sequence[npt.ArrayLike], trained: npt.NDArray[np.bool_]) -> TokenTable:
        """From one array of ids per sample and the loss mask over all of them; a first token carries no loss."""
        flat = flatten(token_ids, np.int64)
        lengths = np.asarray([np.size(ids) for ids in token_ids], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        trained = trained.copy()
        trained[starts[lengths > 0]] = False
        sample = np.repeat(np.arange(len(lengths)), lengths)[trained]
        column = np.flatnonzero(trained) - starts[sample]
        widths, first = np.zeros_like(lengths), lengths + 1
        np.maximum.at(widths, sample, column)
        np.minimum.at(first, sample, column)
        prefix_widths = np.where(widths > 0, first - 1, 0)
        prefixes = [flat[s : s + w].tobytes() for s, w in zip(starts.tolist(), prefix_widths.tolist(), strict=True)]
        number = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
        prefix_ids = np.asarray([number[prefix] for prefix in prefixes], dtype=np.int64)
        return cls(
            token_ids=flat,
            trained=trained,
            starts=starts,
            widths=widths,
            prefix_widths=prefix_widths,
            prefix_ids=prefix_ids,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """R padded rows of L columns and the N trained tokens they predict; the P padded prefixes the rows continue."""

    prefixes: Tensor  # [P, K] token ids; K is 0 where nothing is shared
    prefix_rows: Tensor  # [R], which prefix each row continues
    prefix_widths: Tensor  # [R], how long that prefix is
    inputs: Tensor  # [R, L] token ids
    rows: Tensor  # [N]
    columns: Tensor  # [N], where the logits of the token are: one before its own column
    chosen: Tensor  # [N] token ids
    tokens: Ints  # [N], index into the table
    samples: Ints  # [N], index of the sample


def flatten(arrays: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """One array of all entries in order."""
    return np.concatenate(arrays).astype(dtype, copy=False) if len(arrays) else np.zeros(0, dtype=dtype)


def per_sample(flat: npt.NDArray[Any], token_ids: Sequence[npt.ArrayLike]) -> list[npt.NDArray[Any]]:
    """[S] -> one array for each sample, as long as its `token_ids`."""
    ends = np.cumsum([np.size(ids) for ids in token_ids], dtype=np.int64).tolist()
    return [flat[start:end] for start, end in pairwise([0, *ends])]


def micro_batches(
    table: TokenTable,
    max_tokens: int,
    device: torch.device,
    *,
    share_prefixes: bool,
    pass_cost: int = PASS_COST_TOKENS,
) -> Iterator[MicroBatch]:
    """Every sample with a trained token exactly once, at most `max_tokens` padded tokens at a time; padding is saved
    where it exceeds the `pass_cost`, in tokens, of one more pass.

    With `share_prefixes`, prompts are fed once for all their siblings where that is cheaper.
    """
    widths = (table.widths, table.prefix_widths, table.prefix_ids)
    for bucket in plan(*widths, max_tokens, share=share_prefixes, pass_cost=pass_cost):
        yield _collate(table, bucket, device)


def idle(device: torch.device) -> MicroBatch:
    """A pass over nothing: one column is fed, and no token trained."""

    def nothing(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device)

    return MicroBatch(
        prefixes=nothing(1, 0),
        prefix_rows=nothing(1),
        prefix_widths=nothing(1),
        inputs=nothing(1, 1),
        rows=nothing(0),
        columns=nothing(0),
        chosen=nothing(0),
        tokens=np.zeros(0, dtype=np.int64),
        samples=np.zeros(0, dtype=np.int64),
    )


def _collate(table: TokenTable, bucket: Bucket, device: torch.device) -> MicroBatch:
    samples = np.asarray(bucket.samples)
    prefix_widths = table.prefix_widths[samples] if bucket.widest_prefix else np.zeros_like(samples)
    starts, rests = table.starts[samples] + prefix_widths, table.widths[samples] - prefix_widths
    grid, real = _grid(starts, rests + 1)  # one column more than is fed: the last predicted token
    rows, targets = np.nonzero(table.trained[grid] & real)
    padded = np.where(real, table.token_ids[grid], 0)
    _, owners, prefix_rows = np.unique(table.prefix_ids[samples], return_index=True, return_inverse=True)
    prefix_grid, prefix_real = _grid(table.starts[samples[owners]], prefix_widths[owners])

    def tensor(array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    return MicroBatch(
        prefixes=tensor(np.where(prefix_real, table.token_ids[prefix_grid], 0)),
        prefix_rows=tensor(prefix_rows),
        prefix_widths=tensor(prefix_widths),
        inputs=tensor(padded[:, :-1]),
        rows=tensor(rows),
        columns=tensor(targets - 1),
        chosen=tensor(padded[rows, targets]),
        tokens=grid[rows, targets],
        samples=samples[rows],
    )


def _grid(starts: Ints, widths: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Table indices of `widths` tokens from each of `starts`, padded to a rectangle, and which of them are real."""
    offsets = np.arange(int(widths.max()))
    real = offsets < widths[:, None]
    return np.where(real, starts[:, None] + offsets, 0), real
