"""Micro-batches with little padding or none: rows of similar length, prompts shared by samples of one group, and rows
that hold several samples.

Padded rows: samples are sorted by length. The sorted list is cut where one more pass costs less than the padding that
it saves. Right padding needs no attention mask: under a causal mask no real token sees the tokens to its right. A
prompt that several rows share is computed once. Packed rows: the samples of a pass lie one after the other in a single
row, without padding (`packed_attention.py`).

Columns from the last trained token on are not fed, since no trained token follows. No Python loop runs per token.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.trainer.context_parallel import Context

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PASS_COST_TOKENS = 192
"""Fixed cost of one more forward and backward pass on a CPU, in tokens."""
PASSES = "passes"
"""Column of a batch with the number of the pass to which each sample was assigned, for ranks that make their passes
together."""
EXPERTS = "experts"
"""Column of a batch with the recorded experts of each sample."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Concatenated samples: S tokens of n samples."""

    token_ids: Ints  # [S]
    trained: npt.NDArray[np.bool_]  # [S], tokens that carry a loss
    starts: Ints  # [n], where each sample begins
    widths: Ints  # [n], columns to feed: those before the sample's last trained token; 0 if it has none
    prefix_widths: Ints  # [n], columns before the one that predicts the first trained token
    prefix_ids: Ints  # [n], equal for samples with equal prefixes
    temperatures: npt.NDArray[np.float32] | None = None  # [n], of sampling; None if all are 1
    passes: Ints | None = None  # [n], the number of the pass to which each sample was assigned, if it was
    experts: npt.NDArray[np.int16] | None = None  # [S, layers, k], recorded, -1 where none are; None without a record

    @classmethod
    def build(
        cls,
        token_ids: Sequence[npt.ArrayLike],
        trained: npt.NDArray[np.bool_],
        temperatures: npt.NDArray[np.float32] | None = None,
        passes: Ints | None = None,
        experts: npt.NDArray[np.int16] | None = None,
    ) -> TokenTable:
        """Build the table from one array of ids per sample, and the loss mask over all tokens, [S].

        The first token of a sample carries no loss. Prefixes with different experts are different.
        """
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
        places = [slice(s, s + w) for s, w in zip(starts.tolist(), prefix_widths.tolist(), strict=True)]
        prefixes = [flat[place].tobytes() for place in places]
        if experts is not None:
            prefixes = [ids + experts[place].tobytes() for ids, place in zip(prefixes, places, strict=True)]
        number = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
        prefix_ids = np.asarray([number[prefix] for prefix in prefixes], dtype=np.int64)
        return cls(flat, trained, starts, widths, prefix_widths, prefix_ids, temperatures, passes, experts)

    @property
    def num_replayed(self) -> int:
        """Return the number of trained tokens that follow a token with recorded experts."""
        return 0 if self.experts is None else int((self.trained[1:] & (self.experts[:-1, 0, 0] >= 0)).sum())


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where the samples of a packed row begin and end."""

    positions: Tensor  # [1, num_tokens], of each token in its sample; if ranks share the row, of this rank's tokens
    ends: Tensor  # [num_samples + 1], int32: 0, and the place behind each sample
    lengths: tuple[int, ...]
    context: Context | None = None
    """The ranks that share the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """R padded rows of L columns, the N trained tokens that they predict, and the P padded prefixes of the rows. Or one
    row of packed samples, without padding and prefixes. Several ranks may share such a row: then all tensors are those
    of this rank's run of tokens, and `of_all_tokens` gives the values of all N."""

    prefixes: Tensor  # [P, K] token ids; K is 0 where nothing is shared
    prefix_rows: Tensor  # [R], index of each row's prefix
    prefix_widths: Tensor  # [R], length of each row's prefix
    inputs: Tensor  # [R, L] token ids
    rows: Tensor  # [N]
    columns: Tensor  # [N], where the logits of the token are: one before its own column
    chosen: Tensor  # [N] token ids
    tokens: Ints  # [N], index into the table
    samples: Ints  # [N], index of the sample
    temperature: float | Tensor = 1.0  # of all tokens, or [N]
    boundaries: Boundaries | None = None
    """Of the samples, if they are packed."""
    counts: tuple[int, ...] = ()
    """Trained tokens of each rank that shares the row."""
    prefix_experts: Tensor | None = None  # [P * K, layers, k], recorded experts of the tokens, -1 where none are
    experts: Tensor | None = None  # [R * L, layers, k]

    def of_all_tokens(self, values: Tensor) -> Tensor:
        """Return the values of all trained tokens, [N, ...], from those that this rank has computed."""
        context = self.boundaries.context if self.boundaries is not None else None
        return values if context is None else context.gathered(values, self.counts)


def flatten(arrays: Sequence[npt.ArrayLike], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return all entries of `arrays` as one array, in order."""
    return np.concatenate(arrays).astype(dtype, copy=False) if len(arrays) else np.zeros(0, dtype=dtype)


def per_sample(flat: npt.NDArray[Any], token_ids: Sequence[npt.ArrayLike]) -> list[npt.NDArray[Any]]:
    """Split `flat` [S] into one array per sample, as long as the sample's `token_ids`."""
    ends = np.cumsum([np.size(ids) for ids in token_ids], dtype=np.int64).tolist()
    return [flat[start:end] for start, end in pairwise([0, *ends])]


@dataclass(slots=True)
class Bucket:
    """Samples of one micro-batch: their distinct prefixes, padded, and the continuations of the prefixes, padded."""

    samples: list[int] = field(default_factory=list)
    prefixes: set[int] = field(default_factory=set)
    widest_prefix: int = 0
    widest_rest: int = 0
    real: int = 0
    """Tokens without padding; every prefix counts once."""
    is_packed: bool = False

    @classmethod
    def packed(cls, samples: list[int], widths: Ints) -> Bucket:
        """Return a bucket of samples that are packed into one row."""
        return cls(samples, real=int(widths[samples].sum()), is_packed=True)

    def cost(self, pass_cost: int) -> int:
        """Return the tokens that the model is fed, plus the fixed cost of the passes; prefixes need a second pass."""
        if self.is_packed:
            return self.real + pass_cost
        padded = len(self.prefixes) * self.widest_prefix + len(self.samples) * self.widest_rest
        return padded + pass_cost * (2 if self.widest_prefix else 1)

    def with_row(self, prefix: int, prefix_width: int, rest: int) -> tuple[int, int]:
        """Return the (padded, real) tokens of the bucket with one more row."""
        new = prefix not in self.prefixes
        prefixes = (len(self.prefixes) + new) * max(self.widest_prefix, prefix_width)
        rests = (len(self.samples) + 1) * max(self.widest_rest, rest)
        return prefixes + rests, self.real + rest + new * prefix_width

    def add(self, sample: int, prefix: int, prefix_width: int, rest: int) -> None:
        """Add one row."""
        _, self.real = self.with_row(prefix, prefix_width, rest)
        self.samples.append(sample)
        self.prefixes.add(prefix)
        self.widest_prefix = max(self.widest_prefix, prefix_width)
        self.widest_rest = max(self.widest_rest, rest)


def plan(
    widths: Ints,
    prefix_widths: Ints,
    prefix_ids: Ints,
    max_tokens: int,
    *,
    share: bool,
    pack: bool = False,
    pass_cost: int,
) -> list[Bucket]:
    """Return the cheapest of a few plans that put all samples of non-zero width into buckets. Arrays are [n].

    The first plan sorts rows by length and shares no prefixes; or, with `pack`, its buckets have packed rows of about
    equal width. With `share`, two more plans feed each prefix once per bucket: one keeps the samples of a prefix
    together, the other sorts them by the length of their continuation.
    """
    samples = np.flatnonzero(widths)
    nothing = np.zeros_like(widths)
    if pack:
        rounds = equal_passes(widths[samples].astype(np.float64), widths[samples], max_tokens)
        plans = [[Bucket.packed(samples[places].tolist(), widths) for (places,) in rounds]]
    else:
        by_width = samples[np.argsort(widths[samples], kind="stable")]
        plans = [_cut(by_width, widths, nothing, nothing, max_tokens, pass_cost)]
    if share and len(samples):
        rests = widths - prefix_widths
        widest = np.zeros(int(prefix_ids.max()) + 1, dtype=np.int64)
        np.maximum.at(widest, prefix_ids, rests)
        together = np.lexsort((rests[samples], prefix_ids[samples], widest[prefix_ids[samples]]))
        by_length = np.lexsort((prefix_ids[samples], rests[samples]))
        orders = samples[together], samples[by_length]
        plans += [_cut(order, rests, prefix_widths, prefix_ids, max_tokens, pass_cost) for order in orders]
    return min(plans, key=lambda buckets: sum(bucket.cost(pass_cost) for bucket in buckets))


def _cut(
    order: Ints, rests: Ints, prefix_widths: Ints, prefix_ids: Ints, max_tokens: int, pass_cost: int
) -> list[Bucket]:
    """Cut `order` where a bucket would exceed `max_tokens`, or where its padding would cost more than one pass."""
    rows = zip(
        order.tolist(), prefix_ids[order].tolist(), prefix_widths[order].tolist(), rests[order].tolist(), strict=True
    )
    buckets: list[Bucket] = []
    for sample, prefix, prefix_width, rest in rows:
        padded, real = buckets[-1].with_row(prefix, prefix_width, rest) if buckets else (0, 0)
        if not buckets or padded > max_tokens or padded - real > pass_cost:
            buckets.append(Bucket())
        buckets[-1].add(sample, prefix, prefix_width, rest)
    return buckets


def equal_passes(costs: Floats, widths: Ints, max_tokens: int, num_ranks: int = 1) -> list[list[list[int]]]:
    """Return the samples of each pass of each rank, for ranks that make their passes together: [pass][rank].

    `costs`, `widths`: [n], the cost of each sample, and its tokens. All ranks have the same number of passes, as few as
    possible. A pass has at most `max_tokens` tokens, unless a single sample is longer. Samples are assigned from the
    most expensive to the cheapest, each to the pass with the least cost that has room (Graham's LPT rule). Passes of
    similar cost are made together. The order of the ranks alternates, so that they have about equal work.
    """
    order = np.argsort(-costs, kind="stable").tolist()
    fewest = min(-(-int(widths.sum()) // max_tokens), len(order))
    num_passes = -(-fewest // num_ranks)
    too_few, growth = num_passes - 1, 1
    while (made := _filled(order, costs, widths, max_tokens, num_passes * num_ranks)) is None:
        too_few, num_passes, growth = num_passes, num_passes + growth, 2 * growth
    while num_passes - too_few > 1:
        middle = (num_passes + too_few) // 2
        if (fewer := _filled(order, costs, widths, max_tokens, middle * num_ranks)) is None:
            too_few = middle
        else:
            made, num_passes = fewer, middle
    rounds = [made[start : start + num_ranks] for start in range(0, len(made), num_ranks)]
    return [ranks[::-1] if number % 2 else ranks for number, ranks in enumerate(rounds)]


def _filled(order: list[int], costs: Floats, widths: Ints, max_tokens: int, num_passes: int) -> list[list[int]] | None:
    """Return the samples of so many passes, from the most expensive to the cheapest one. None if they do not fit."""
    passes: list[list[int]] = [[] for _ in range(num_passes)]
    loads, tokens = [(0.0, number) for number in range(num_passes)], [0] * num_passes  # a heap
    for sample in order:
        full = []
        while loads and passes[loads[0][1]] and tokens[loads[0][1]] + widths[sample] > max_tokens:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        load, number = loads[0]
        passes[number].append(sample)
        tokens[number] += int(widths[sample])
        heapq.heapreplace(loads, (load + float(costs[sample]), number))
        for each in full:
            heapq.heappush(loads, each)
    return [passes[number] for _, number in sorted(loads, reverse=True)]


def micro_batches(
    table: TokenTable,
    max_tokens: int,
    device: torch.device,
    *,
    share_prefixes: bool,
    pack: bool = False,
    pass_cost: int = PASS_COST_TOKENS,
    context: Context | None = None,
) -> Iterator[MicroBatch]:
    """Yield micro-batches that hold every sample with a trained token exactly once.

    A micro-batch has at most `max_tokens` tokens with padding, unless a single sample is longer. It is split if its
    padding exceeds `pass_cost`, the cost of one more pass in tokens. With `share_prefixes`, samples with an equal
    prompt share its computation where that is cheaper. With `pack`, samples are packed. If they were assigned to
    passes, these are kept. `context`: the ranks that share each pass; this needs `pack`.
    """
    if pack and table.passes is not None:
        samples = np.flatnonzero(table.widths)
        numbers = table.passes[samples]
        buckets = [Bucket.packed(samples[numbers == number].tolist(), table.widths) for number in np.unique(numbers)]
    else:
        widths = (table.widths, table.prefix_widths, table.prefix_ids)
        buckets = plan(*widths, max_tokens, share=share_prefixes, pack=pack, pass_cost=pass_cost)
    for bucket in buckets:
        yield _packed(table, bucket, device, context) if bucket.is_packed else _padded(table, bucket, device)


def idle(device: torch.device) -> MicroBatch:
    """Return an empty micro-batch: it feeds one column and trains no token."""
    zero, one = np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.int64)
    table = TokenTable(np.zeros(2, np.int64), np.zeros(2, bool), zero, widths=one, prefix_widths=zero, prefix_ids=zero)
    return _padded(table, Bucket(samples=[0]), device)


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on `device`. On CUDA the copy waits for no earlier work."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _packed(table: TokenTable, bucket: Bucket, device: torch.device, context: Context | None) -> MicroBatch:
    samples = np.asarray(bucket.samples)
    lengths = table.widths[samples]
    ends = np.concatenate(([0], np.cumsum(lengths)))
    positions = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    places = np.repeat(table.starts[samples], lengths) + positions
    columns = np.flatnonzero(table.trained[places + 1])
    tokens, of_tokens = places[columns] + 1, np.repeat(samples, lengths)[columns]
    inputs, counts, real = table.token_ids[places], (len(columns),), np.ones(len(places), dtype=np.bool_)
    run, own = slice(None), slice(None)  # this rank's tokens, and its trained ones
    if context is not None:
        if rest := -len(inputs) % context.size:  # more tokens, as a sample without trained tokens
            inputs, positions = np.pad(inputs, (0, rest)), np.concatenate((positions, np.arange(rest)))
            places, real = np.pad(places, (0, rest)), np.pad(real, (0, rest))
            lengths, ends = np.append(lengths, rest), np.append(ends, ends[-1] + rest)
        width = len(inputs) // context.size
        run = slice(context.index * width, (context.index + 1) * width)
        bounds = np.searchsorted(columns, np.arange(context.size + 1) * width)
        counts, own = tuple(np.diff(bounds).tolist()), slice(*bounds[context.index : context.index + 2].tolist())
        columns = columns[own] - run.start
    nothing = np.zeros(0, dtype=np.int64)
    return MicroBatch(
        prefixes=on_device(nothing.reshape(0, 0), device),
        prefix_rows=on_device(nothing, device),
        prefix_widths=on_device(nothing, device),
        inputs=on_device(inputs[None, run], device),
        rows=on_device(np.zeros_like(columns), device),
        columns=on_device(columns, device),
        chosen=on_device(table.token_ids[tokens[own]], device),
        tokens=tokens,
        samples=of_tokens,
        temperature=_temperature(table, samples, of_tokens[own], device),
        boundaries=Boundaries(
            positions=on_device(positions[None, run], device),
            ends=on_device(ends.astype(np.int32), device),
            lengths=tuple(lengths.tolist()),
            context=context,
        ),
        counts=counts,
        experts=_experts(table, places[run], real[run], device),
    )


def _padded(table: TokenTable, bucket: Bucket, device: torch.device) -> MicroBatch:
    samples = np.asarray(bucket.samples)
    prefix_widths = table.prefix_widths[samples] if bucket.widest_prefix else np.zeros_like(samples)
    starts, rests = table.starts[samples] + prefix_widths, table.widths[samples] - prefix_widths
    grid, real = _grid(starts, rests + 1)  # one more column than is fed: the last predicted token
    rows, targets = np.nonzero(table.trained[grid] & real)
    padded = np.where(real, table.token_ids[grid], 0)
    _, owners, prefix_rows = np.unique(table.prefix_ids[samples], return_index=True, return_inverse=True)
    prefix_grid, prefix_real = _grid(table.starts[samples[owners]], prefix_widths[owners])
    return MicroBatch(
        prefixes=on_device(np.where(prefix_real, table.token_ids[prefix_grid], 0), device),
        prefix_rows=on_device(prefix_rows, device),
        prefix_widths=on_device(prefix_widths, device),
        inputs=on_device(padded[:, :-1], device),
        rows=on_device(rows, device),
        columns=on_device(targets - 1, device),
        chosen=on_device(padded[rows, targets], device),
        tokens=grid[rows, targets],
        samples=samples[rows],
        temperature=_temperature(table, samples, samples[rows], device),
        prefix_experts=_experts(table, prefix_grid, prefix_real, device),
        experts=_experts(table, grid[:, :-1], real[:, :-1], device),
    )


def _experts(table: TokenTable, places: Ints, real: npt.NDArray[np.bool_], device: torch.device) -> Tensor | None:
    """Return the recorded experts of the tokens at `places` of the table, row by row; -1 where they are not `real`."""
    if table.experts is None:
        return None
    return on_device(np.where(real.reshape(-1, 1, 1), table.experts[places.reshape(-1)], np.int16(-1)), device)


def _temperature(table: TokenTable, samples: Ints, of_tokens: Ints, device: torch.device) -> float | Tensor:
    """Return the temperature of all tokens, or [N]. `samples`: those of the micro-batch. `of_tokens`: [N]."""
    if table.temperatures is None:
        return 1.0
    distinct = np.unique(table.temperatures[samples])
    return float(distinct[0]) if len(distinct) == 1 else on_device(table.temperatures[of_tokens], device)


def _grid(starts: Ints, widths: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Return table indices of `widths` tokens from each of `starts`, as a padded rectangle, and a mask of real ones."""
    offsets = np.arange(int(widths.max()))
    real = offsets < widths[:, None]
    return np.where(real, starts[:, None] + offsets, 0), real
