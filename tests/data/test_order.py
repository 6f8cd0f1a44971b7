"""Mixtures and shuffled orders are functions of a position, and keep to their weights."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.interleaving import Interleaving, chairmen
from penstock.data.items import permuted

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 12), min_size=2)


@given(WEIGHTS)
def test_every_beginning_is_as_close_to_the_weights_as_can_be(weights: dict[str, int]) -> None:
    period, total = chairmen(weights), sum(weights.values())
    assert Counter(period) == weights
    taken = dict.fromkeys(weights, 0)
    for place, part in enumerate(period, start=1):
        taken[part] += 1
        furthest = max(abs(taken[part] - weight * place / total) for part, weight in weights.items())
        assert furthest <= 1 - 1 / (2 * len(weights) - 2) + 1e-9


@given(weights=WEIGHTS, data=st.data())
def test_every_item_of_every_part_comes_once_and_in_its_order(weights: dict[str, int], data: st.DataObject) -> None:
    sizes: dict[str, int | None] = {part: data.draw(st.integers(0, 20), label=part) for part in weights}
    order = Interleaving(weights, sizes)
    assert order.size == sum(size or 0 for size in sizes.values())
    places = [order.at(position) for position in range(order.size or 0)]
    assert order.at(len(places)) is None
    found = {part: [place[1] for place in places if place and place[0] == part] for part in weights}
    assert found == {part: list(range(size or 0)) for part, size in sizes.items()}


def test_a_part_without_end_goes_on_when_the_others_are_used_up() -> None:
    order = Interleaving({"a": 1, "b": 1}, {"a": 2, "b": None})
    assert order.size is None
    assert [order.at(position) for position in (3, 4, 1_000_000)] == [("b", 1), ("b", 2), ("b", 999_998)]


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 1000])
def test_a_permutation_has_everything_once(size: int) -> None:
    order = [permuted(number, size, seed=5) for number in range(size)]
    assert sorted(order) == list(range(size))
    if size > 3:
        assert order != sorted(order) and order != [permuted(number, size, seed=6) for number in range(size)]


def test_a_permutation_mixes_well() -> None:
    size = 10_000
    moved = [abs(permuted(number, size, seed=1) - number) for number in range(size)]
    assert sum(moved) / size == pytest.approx(size / 3, rel=0.05)
