"""Balance samples over ranks, with about equal work for each rank. Pure functions.

Work is counted in tokens, plus the cost of each token's attention to earlier tokens.

Replicas wait for each other once per step, so only the sums of their work count. Samples of one group share a prompt,
which a rank computes only once. Samples are therefore assigned in bundles of one group. Bundles are small, so that one
bundle more or less matters little.

Shards wait for each other in every pass. If they pack samples, every sample is assigned to a pass too, so that all
ranks have equally many passes, and those that are made together have about equal cost.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from penstock.groups.batch import Batch
from penstock.model.experts import num_active
from penstock.model.load_policy import FULL, attention_kinds
from penstock.trainer.packing import PASSES, equal_passes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BUNDLES_PER_RANK = 8
"""A bundle costs at most 1 / BUNDLES_PER_RANK of a rank's fair share, unless it is a single sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the work of the ranks depends on."""

    attention_per_token: float = 0.0
    """See `costs`."""
    pass_tokens: int | None = None
    """Maximum number of tokens of a pass, if every pass is one of all ranks and has packed samples; otherwise None."""
    early_apart: bool = False
    """Whether the `early` samples of a batch are trained before the others, in passes of their own."""


def split_over_ranks(batch: Batch, num_ranks: int, work: Work) -> list[Batch]:
    """Return each rank's part of a batch from `prepare`. With `pass_tokens` the parts have the column `passes`."""
    lengths = np.asarray([len(ids) for ids in batch["token_ids"]], dtype=np.int64)
    cost = costs(lengths, work.attention_per_token)
    if work.pass_tokens is None:
        return [batch.select(part) for part in balance(cost, batch["groups"], num_ranks)]
    early = np.asarray(batch["early"], dtype=np.bool_) & work.early_apart
    ranks, passes = np.zeros_like(lengths), np.zeros_like(lengths)
    num_passes = 0
    for samples in (np.flatnonzero(early), np.flatnonzero(~early)):
        for parts in equal_passes(cost[samples], lengths[samples], work.pass_tokens, num_ranks):
            for rank, part in enumerate(parts):
                own = samples[np.asarray(part, dtype=np.int64)]
                ranks[own], passes[own] = rank, num_passes
            num_passes += 1
    return [
        batch.select(np.flatnonzero(ranks == rank)).union(Batch({PASSES: passes[ranks == rank]}))
        for rank in range(num_ranks)
    ]


def costs(lengths: npt.ArrayLike, attention_per_token: float) -> Floats:
    """Return the cost of samples with these lengths, [n] -> [n]. The unit is the cost of one token without context.

    `attention_per_token`: the cost that one token of context adds to each later token, in the same unit. It is 0 if
    attention does not reach back over the whole context.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    return tokens * (1.0 + 0.5 * attention_per_token * tokens)


def attention_per_token(model: PreTrainedModel) -> float:
    """Return the `attention_per_token` of a model, for `costs`.

    Per layer and token of context, attention takes two products over all heads. The remaining compute is one product
    with each weight, but for those of experts that a token is not sent to. The result is 0 for models with attention
    windows, since a window bounds the context.
    """
    config = model.config.get_text_config()
    if attention_kinds(config) != {FULL}:
        return 0.0
    heads = config.num_attention_heads
    width: int = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    embedded: int = model.get_input_embeddings().weight.numel()
    projected = embedded if config.tie_word_embeddings else 0  # tied: one tensor, and it computes the output
    weights: int = num_active(model) - embedded + projected
    layers: int = config.num_hidden_layers
    return 2.0 * layers * width / weights


def balance(costs: Floats, groups: npt.ArrayLike, num_ranks: int) -> list[Ints]:
    """Return the sample indices of each rank, in ascending order. Each sample has one rank; a rank may have none.

    `groups` [n] names each sample's group; the samples of a group are adjacent. Bundles are assigned from the most
    expensive to the cheapest, each to the rank with the least work (Graham's LPT rule). The work of any two ranks
    differs by at most the most expensive bundle.
    """
    bundles = _bundles(costs, np.asarray(groups), most=float(costs.sum()) / num_ranks / BUNDLES_PER_RANK)
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap
    for bundle in sorted(bundles, key=lambda bundle: -float(costs[bundle].sum())):
        load, rank = loads[0]
        parts[rank] += bundle
        heapq.heapreplace(loads, (load + float(costs[bundle].sum()), rank))
    return [np.sort(np.asarray(part, dtype=np.int64)) for part in parts]


def _bundles(costs: Floats, groups: npt.NDArray[np.int64], *, most: float) -> list[list[int]]:
    """Return runs of adjacent samples of one group, cut where a run would cost more than `most`."""
    bundles: list[list[int]] = []
    load = 0.0
    for place, cost in enumerate(costs.tolist()):
        if place == 0 or groups[place] != groups[place - 1] or load + cost > most:
            bundles.append([])
            load = 0.0
        bundles[-1].append(place)
        load += cost
    return bundles
