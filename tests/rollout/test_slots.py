"""Closing holes loses no sequence, groups equal lengths, and moves few rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rollout.slots import GROUP_ROWS, regroup

rows = st.lists(st.tuples(st.integers(0, 200), st.booleans()), min_size=1, max_size=4 * GROUP_ROWS)


@settings(deadline=None)
@given(rows)
def test_live_rows_fill_the_front_grouped_by_length(rows: list[tuple[int, bool]]) -> None:
    lengths = np.array([length for length, _ in rows])
    live = np.array([alive for _, alive in rows])
    num_live = int(live.sum())
    source, target = regroup(lengths, live)

    after = np.arange(len(rows))
    after[target] = source
    after = after[:num_live]
    assert sorted(after) == np.flatnonzero(live).tolist()
    groups = [lengths[after[i : i + GROUP_ROWS]] for i in range(0, num_live, GROUP_ROWS)]
    for longer, shorter in pairwise(groups):
        assert longer.min() >= shorter.max()


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=4 * GROUP_ROWS), st.data())
def test_one_departure_moves_at_most_one_row_per_group(lengths: list[int], data: st.DataObject) -> None:
    ordered = np.sort(np.array(lengths))[::-1]
    live = np.ones(len(lengths), dtype=np.bool_)
    live[data.draw(st.integers(0, len(lengths) - 1))] = False
    assert len(regroup(ordered, live)[0]) <= -(-len(lengths) // GROUP_ROWS)


def test_nothing_moves_without_a_hole() -> None:
    lengths = np.full(2 * GROUP_ROWS, 7)
    assert len(regroup(lengths, np.ones(len(lengths), dtype=np.bool_))[0]) == 0
