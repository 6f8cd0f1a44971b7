import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.prepare import generalized_advantages, group_advantages

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


@given(
    episodes=st.lists(
        st.tuples(st.floats(-1, 1), st.lists(st.tuples(st.floats(-1, 1), st.booleans()), min_size=1, max_size=6)),
        min_size=1,
        max_size=4,
    ),
    discount=st.sampled_from([1.0, 0.9]),
    trace=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_generalized_advantages_equal_their_sum(
    episodes: list[tuple[float, list[tuple[float, bool]]]], discount: float, trace: float
) -> None:
    flat = [token for _, tokens in episodes for token in tokens]
    values = np.asarray([value for value, _ in flat], dtype=np.float32)
    sampled = np.asarray([chosen for _, chosen in flat])
    advantages, returns = generalized_advantages(
        [reward for reward, _ in episodes],
        values,
        sampled,
        [len(tokens) for _, tokens in episodes],
        discount=discount,
        trace=trace,
    )
    start = 0
    for reward, tokens in episodes:
        places = [start + i for i, (_, chosen) in enumerate(tokens) if chosen]
        start += len(tokens)
        v = [*(float(values[place]) for place in places), 0.0]
        r = [0.0] * (len(places) - 1) + [reward]
        deltas = [r[t] + discount * v[t + 1] - v[t] for t in range(len(places))]
        for t, place in enumerate(places):
            expected = sum((discount * trace) ** (later - t) * deltas[later] for later in range(t, len(places)))
            assert advantages[place] == pytest.approx(expected, abs=1e-5)
            assert returns[place] == pytest.approx(expected + v[t], abs=1e-5)
    assert not advantages[~sampled].any() and not returns[~sampled].any()
