"""Which rank trains which samples: about equal work for each. Pure.

Work is counted in tokens, plus what attention to earlier tokens adds to each. A prompt that siblings share is computed
once where they are together; so they are dealt in bundles, small enough that a bundle too many matters little.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from penstock.groups.batch import Batch
from penstock.model.attention import FULL, attention_kinds

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BUNDLES_PER_RANK = 8
"""A bundle of siblings costs at most this part of a rank's fair share, unless it is a single sample."""


def dealt(batch: Batch, num_ranks: int, attention_per_token: float) -> list[Batch]:
    """The samples of a batch from `prepare`, by rank. `attention_per_token`: see `costs`."""
    lengths = [len(ids) for ids in batch["token_ids"]]
    return [batch.select(hand) for hand in deal(costs(lengths, attention_per_token), batch["groups"], num_ranks)]


def costs(lengths: npt.ArrayLike, attention_per_token: float) -> Floats:
    """[n] -> [n]: what samples of so many tokens cost, in tokens without context.

    `attention_per_token`: what one token of context adds to a token that comes after it, as a share of that token's own
    cost; 0 where attention does not reach back.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    return tokens * (1.0 + 0.5 * attention_per_token * tokens)


def attention_per_token(model: PreTrainedModel) -> float:
    """What `costs` needs to know of a model. Per layer and token of context, attention takes two products over all of
    its heads; everything else is one product with each weight. Windows bound the context, and count as none."""
    config = model.config.get_text_config()
    if attention_kinds(config) != {FULL}:
        return 0.0
    heads = config.num_attention_heads
    width: int = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    embedded: int = model.get_input_embeddings().weight.numel()
    projected = embedded if config.tie_word_embeddings else 0  # the output's weights, where they are not counted twice
    weights: int = sum(p.numel() for p in model.parameters()) - embedded + projected
    layers: int = config.num_hidden_layers
    return 2.0 * layers * width / weights


def deal(costs: Floats, groups: npt.ArrayLike, num_ranks: int) -> list[Ints]:
    """For each rank the samples it trains, in ascending order; together every sample exactly once, some perhaps none.

    `groups` [n] names each sample's group; members are neighbours. Bundles go, the most expensive first, to whoever has
    least (Graham's LPT rule): no two ranks differ by more than the most expensive bundle.
    """
    bundles = _bundles(costs, np.asarray(groups), most=float(costs.sum()) / num_ranks / BUNDLES_PER_RANK)
    hands: list[list[Ints]] = [[] for _ in range(num_ranks)]
    least = [(0.0, rank) for rank in range(num_ranks)]
    for bundle in sorted(bundles, key=lambda bundle: -float(costs[bundle].sum())):
        load, rank = least[0]
        hands[rank].append(bundle)
        heapq.heapreplace(least, (load + float(costs[bundle].sum()), rank))
    return [np.sort(np.concatenate(hand)) if hand else np.zeros(0, dtype=np.int64) for hand in hands]


def _bundles(costs: Floats, groups: npt.NDArray[np.int64], *, most: float) -> list[Ints]:
    """Neighbours of one group, cut where they would cost more than `most`."""
    bundles: list[Ints] = []
    bounds = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    for start, end in pairwise(bounds):
        first, load = start, 0.0
        for place in range(start, end):
            if place > first and load + costs[place] > most:
                bundles.append(np.arange(first, place))
                first, load = place, 0.0
            load += costs[place]
        if end > first:
            bundles.append(np.arange(first, end))
    return bundles
