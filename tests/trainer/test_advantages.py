import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.advantages import group_advantages

REWARDS = st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=24)


@given(pairs=REWARDS, normalize=st.booleans())
def test_every_sample_is_compared_with_its_own_group(pairs: list[tuple[int, float]], normalize: bool) -> None:
    groups, rewards = [group for group, _ in pairs], [reward for _, reward in pairs]
    found = group_advantages(rewards, groups, normalize=normalize)
    for (group, reward), advantage in zip(pairs, found, strict=True):
        members = [r for g, r in pairs if g == group]
        expected = reward - statistics.fmean(members)
        if max(members) == min(members):
            expected = 0.0
        elif normalize:
            expected /= statistics.pstdev(members) + 1e-6
        assert advantage == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_equal_rewards_give_exactly_zero() -> None:
    assert not group_advantages([0.1] * 3, [0, 0, 0], normalize=True).any()


def test_nothing_to_compare() -> None:
    assert group_advantages([], [], normalize=True).shape == (0,)
    assert group_advantages([5.0], [1], normalize=True).tolist() == [0.0]


def test_members_of_a_group_need_not_be_neighbours() -> None:
    found = group_advantages([1.0, 5.0, 0.0, 7.0], [4, 9, 4, 9], normalize=False)
    np.testing.assert_allclose(found, [0.5, -1.0, -0.5, 1.0])
