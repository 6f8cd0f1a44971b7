"""Every sample goes to one rank, and all ranks have about equal work."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from penstock.groups.batch import Batch
from penstock.trainer.packing import PASSES
from penstock.trainer.rank_balancing import (
    BUNDLES_PER_RANK,
    Work,
    attention_per_token,
    balance,
    costs,
    split_over_ranks,
)

LENGTHS = st.lists(st.lists(st.integers(1, 10_000), min_size=1, max_size=9), max_size=12)
"""By group."""


@given(lengths=LENGTHS, num_ranks=st.integers(1, 9), attention=st.sampled_from([0.0, 1e-4, 0.1]))
def test_every_sample_has_one_rank_and_no_rank_has_much_more(
    lengths: list[list[int]], num_ranks: int, attention: float
) -> None:
    groups = [group for group, members in enumerate(lengths) for _ in members]
    cost = costs([length for members in lengths for length in members], attention)
    parts = balance(cost, groups, num_ranks)
    assert sorted(place for part in parts for place in part.tolist()) == list(range(len(groups)))
    assert all((np.diff(part) > 0).all() for part in parts)
    loads = [float(cost[part].sum()) for part in parts]
    bundle = max(float(cost.max(initial=0.0)), float(cost.sum()) / num_ranks / BUNDLES_PER_RANK)
    assert max(loads) - min(loads) <= bundle * (1 + 1e-9)


def test_siblings_stay_together_where_there_are_many_groups() -> None:
    groups = np.repeat(np.arange(32), 8)
    for part in balance(costs(np.full(256, 100), 0.0), groups, 2):
        assert len(part) == 128 and set(np.bincount(groups[part]).tolist()) <= {0, 8}


def test_one_long_answer_is_matched_by_many_short_ones() -> None:
    lengths = [1000, *[10] * 100]
    assert sorted(len(part) for part in balance(costs(lengths, 0.0), range(101), 2)) == [1, 100]


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_with_less_to_do_than_ranks_some_have_nothing(num_ranks: int) -> None:
    for num_samples in (0, 1):
        parts = balance(costs([7] * num_samples, 0.0), [0] * num_samples, num_ranks)
        assert len(parts) == num_ranks and sum(map(len, parts)) == num_samples


@given(lengths=LENGTHS, num_ranks=st.integers(1, 9), early_apart=st.booleans())
def test_ranks_that_wait_for_each_other_are_told_the_passes(
    lengths: list[list[int]], num_ranks: int, early_apart: bool
) -> None:
    flat = [length for members in lengths for length in members]
    early = np.arange(len(flat)) < len(flat) // 2
    numbered = {"groups": np.zeros(len(flat), dtype=np.int64), "early": early, "number": np.arange(len(flat))}
    batch = Batch(numbered, {"token_ids": [np.zeros(length) for length in flat]})
    parts = split_over_ranks(batch, num_ranks, Work(pass_tokens=8000, early_apart=early_apart))
    assert sorted(number for part in parts for number in part["number"].tolist()) == list(range(len(flat)))
    seen: dict[int, set[bool]] = {}
    for part in parts:
        for number in np.unique(part[PASSES]).tolist():
            own = part[PASSES] == number
            tokens = [len(ids) for ids, mine in zip(part["token_ids"], own, strict=True) if mine]
            assert sum(tokens) <= 8000 or len(tokens) == 1
            seen.setdefault(number, set()).update(part["early"][own].tolist())
    assert sorted(seen) == list(range(len(seen)))
    assert not early_apart or all(len(each) == 1 for each in seen.values()), "a pass is early or late"


def test_attention_makes_long_samples_dear() -> None:
    assert costs([100, 200], 0.0).tolist() == [100.0, 200.0]
    assert costs([100, 200], 0.01).tolist() == [150.0, 400.0], "on average half of a sample lies before a token"


def test_what_attention_adds_follows_from_the_models_shape(make_model: Callable[[], PreTrainedModel]) -> None:
    model = make_model()
    weights = sum(p.numel() for p in model.parameters())  # the embedding is the output projection too
    assert attention_per_token(model) == pytest.approx(2 * 2 * 32 / weights)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert attention_per_token(model) == 0.0
