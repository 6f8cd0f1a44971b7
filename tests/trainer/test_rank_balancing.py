"""Every sample goes to one rank, and all ranks have about equal work."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from penstock.trainer.rank_balancing import BUNDLES_PER_RANK, attention_per_token, balance, costs

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


def test_attention_makes_long_samples_dear() -> None:
    assert costs([100, 200], 0.0).tolist() == [100.0, 200.0]
    assert costs([100, 200], 0.01).tolist() == [150.0, 400.0], "on average half of a sample lies before a token"


def test_what_attention_adds_follows_from_the_models_shape(make_model: Callable[[], PreTrainedModel]) -> None:
    model = make_model()
    weights = sum(p.numel() for p in model.parameters())  # the embedding is the output projection too
    assert attention_per_token(model) == pytest.approx(2 * 2 * 32 / weights)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert attention_per_token(model) == 0.0
