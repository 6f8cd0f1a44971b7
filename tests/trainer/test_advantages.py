import dataclasses
import statistics
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import AdvantagesConfig
from penstock.samples import Credit, Sample, TrainedTurn
from penstock.trainer.advantages import advantages, generalized_advantages, group_advantages, token_rewards

GRPO, PLAIN = AdvantagesConfig(), AdvantagesConfig(normalize=False)
REWARDS = st.lists(st.tuples(st.integers(0, 3), st.floats(-10, 10)), min_size=1, max_size=24)


@given(pairs=REWARDS, convention=st.sampled_from([None, "population", "sample"]))
def test_every_sample_is_compared_with_its_own_group(
    pairs: list[tuple[int, float]], convention: Literal["population", "sample"] | None
) -> None:
    """`convention`: the standard deviation that divides; None: nothing divides."""
    groups, rewards = [group for group, _ in pairs], [reward for _, reward in pairs]
    found = group_advantages(rewards, groups, PLAIN if convention is None else AdvantagesConfig(deviation=convention))
    deviation = statistics.pstdev if convention == "population" else statistics.stdev
    for (group, reward), advantage in zip(pairs, found, strict=True):
        members = [r for g, r in pairs if g == group]
        expected = reward - statistics.fmean(members)
        if max(members) == min(members):
            expected = 0.0
        elif convention is not None:
            expected /= deviation(members) + 1e-6
        assert advantage == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_equal_rewards_give_exactly_zero() -> None:
    assert not group_advantages([0.1] * 3, [0, 0, 0], GRPO).any()


def test_nothing_to_compare() -> None:
    assert group_advantages([], [], GRPO).shape == (0,)
    assert group_advantages([5.0], [1], GRPO).tolist() == [0.0]


def test_members_of_a_group_need_not_be_neighbours() -> None:
    found = group_advantages([1.0, 5.0, 0.0, 7.0], [4, 9, 4, 9], PLAIN)
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
    rewards = np.zeros(len(flat), dtype=np.float32)
    ends = np.cumsum([len(tokens) for _, tokens in episodes])
    for (reward, tokens), end in zip(episodes, ends, strict=True):
        if places := [i for i, (_, chosen) in enumerate(tokens) if chosen]:
            rewards[end - len(tokens) + places[-1]] = reward
    found, returns = generalized_advantages(
        rewards,
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
            assert found[place] == pytest.approx(expected, abs=1e-5)
            assert returns[place] == pytest.approx(expected + v[t], abs=1e-5)
    assert not found[~sampled].any() and not returns[~sampled].any()


# --- turns ------------------------------------------------------------------------------------------------------------


def played(
    episode: int,
    turns: list[tuple[float, int]],
    *,
    group: int = 0,
    credit: Credit | None = None,
    conversation: int = 0,
    first: int = 0,
) -> Sample:
    """A sample with one turn for each (reward, state). Each turn has one token of prompt and two of action."""
    trained = [TrainedTurn(first + i, 3 * i + 1, 3 * i + 3, *turn) for i, turn in enumerate(turns)]
    sampled = [0, 1, 1] * len(turns)
    return Sample(
        group=group,
        episode=episode,
        reward=sum(reward for reward, _ in turns),
        truncated=False,
        conversation=conversation,
        credit=credit,
        turns=trained,
        token_ids=np.arange(len(sampled), dtype=np.int32),
        loss_mask=np.asarray(sampled, dtype=np.uint8),
        logprobs=np.zeros(len(sampled), dtype=np.float32),
        versions=np.asarray(sampled, dtype=np.int32) - 1,
    )


def of_turns(found: object) -> list[list[float]]:
    """The advantage of each turn, after a check that its tokens share it and that others have none."""
    assert isinstance(found, list)
    for array in found:
        rows = array.reshape(-1, 3)
        assert not rows[:, 0].any() and (rows[:, 1] == rows[:, 2]).all()
    return [array.reshape(-1, 3)[:, 1].tolist() for array in found]


def plain(name: str, **settings: object) -> AdvantagesConfig:
    return AdvantagesConfig.model_validate({"name": name, "normalize": False, **settings})


def test_a_turn_is_compared_with_the_same_turn_of_others() -> None:
    samples = [played(0, [(0.0, 1), (1.0, 2)]), played(1, [(0.5, 1)]), played(2, [(0.0, 1), (0.0, 3)])]
    first, second, third = of_turns(advantages(samples, plain("turn", discount=0.5)))
    mean = (0.5 + 0.5 + 0.0) / 3  # of the returns of the first turns
    assert first == pytest.approx([0.5 - mean, 0.5])
    assert second == pytest.approx([0.5 - mean])
    assert third == pytest.approx([-mean, -0.5])


def test_gigpo_adds_what_a_turn_did_in_its_state() -> None:
    """Both episodes pass through state 7, at different turns. State 9 occurs once."""
    samples = [played(0, [(0.0, 7), (1.0, 9)]), played(1, [(0.0, 8), (0.0, 7)])]
    first, second = of_turns(advantages(samples, plain("gigpo", discount=0.5, turn_weight=2.0)))
    assert first == pytest.approx([0.5 + 2 * 0.25, 0.5])
    assert second == pytest.approx([-0.5, -0.5 - 2 * 0.25])


def test_a_state_that_an_episode_meets_again_is_compared_with_itself() -> None:
    (found,) = of_turns(advantages([played(0, [(0.0, 7), (1.0, 7)])], plain("gigpo", discount=0.5)))
    assert found == pytest.approx([-0.25, 0.25])


def test_turns_in_samples_of_their_own_have_the_same_advantages() -> None:
    whole = [played(0, [(0.25, 7), (1.0, 8)]), played(1, [(0.5, 7), (0.0, 8)])]
    parts = [
        played(sample.episode, [(turn.reward, turn.state)], first=turn.turn)
        for sample in whole
        for turn in sample.turns
    ]
    parts = [dataclasses.replace(part, reward=whole[part.episode].reward) for part in parts]
    for name in ("turn", "gigpo"):
        together = of_turns(advantages(whole, plain(name)))
        apart = of_turns(advantages(parts, plain(name)))
        assert [one for each in together for one in each] == pytest.approx([one for each in apart for one in each])


@given(
    episodes=st.lists(
        st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 2)), min_size=1, max_size=4), min_size=1, max_size=5
    )
)
def test_a_single_turn_is_an_episode(episodes: list[list[tuple[float, int]]]) -> None:
    samples = [played(number, turns[:1]) for number, turns in enumerate(episodes)]
    expected = np.asarray(advantages(samples, AdvantagesConfig()))
    np.testing.assert_allclose(of_turns(advantages(samples, AdvantagesConfig(name="turn"))), expected[:, None])


@given(
    episodes=st.lists(
        st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 2)), min_size=1, max_size=4), min_size=1, max_size=5
    )
)
def test_token_rewards_add_up_to_the_reward(episodes: list[list[tuple[float, int]]]) -> None:
    samples = [played(number, turns) for number, turns in enumerate(episodes)]
    for sample, earned in zip(samples, token_rewards(samples), strict=True):
        assert earned.sum() == pytest.approx(sample.reward, abs=1e-5) and not earned[sample.loss_mask == 0].any()
        by_turn = [earned[turn.start : turn.end].sum() for turn in sample.turns]
        assert by_turn == pytest.approx([turn.reward for turn in sample.turns], abs=1e-5)


def test_a_sample_earns_what_follows_it_at_its_end() -> None:
    """The turns of an episode as samples of their own: the first one also earns the reward of the second."""
    first, second = played(0, [(0.25, 1)]), played(0, [(1.0, 2)], first=1)
    samples = [dataclasses.replace(each, reward=1.25) for each in (first, second)]
    assert [each.tolist() for each in token_rewards(samples)] == [[0, 0, 1.25], [0, 0, 1.0]]


def test_turns_that_were_dropped_still_count() -> None:
    """The last branch of an episode may be too long to train: its reward then counts at the last turn that is left."""
    cut = dataclasses.replace(played(0, [(0.0, 1), (0.0, 2)]), reward=1.0)
    first, _ = of_turns(advantages([cut, played(1, [(0.0, 1), (0.0, 2)])], plain("turn", discount=0.5)))
    assert first == pytest.approx([0.25, 0.5])


def test_turns_that_are_not_trained_have_earned_their_rewards_before() -> None:
    """What a dropped sample has earned does not count later, and its turn keeps its place."""
    first, later = played(0, [(5.0, 1)]), played(0, [(1.0, 2), (0.0, 3)], first=1)
    parts = [dataclasses.replace(each, reward=6.0) for each in (first, later)]
    other = played(1, [(0.0, 1), (3.0, 2), (0.0, 3)])
    found = advantages([parts[1], other], plain("turn", discount=1.0), dropped=parts[:1])
    assert of_turns(found) == [[-1.0, 0.0], [0.0, 1.0, 0.0]]
    assert token_rewards([parts[1]], dropped=parts[:1])[0].sum() == 1.0


def test_a_critic_sees_the_rewards_of_branches_in_between() -> None:
    """Turns 0 and 2 are one branch, 1 and 3 another."""
    turns = [TrainedTurn(0, 1, 3, 0.0, 1), TrainedTurn(2, 4, 6, 1.0, 2)]
    one = dataclasses.replace(played(0, [(0.0, 1), (1.0, 2)]), turns=turns, reward=6.0)
    turns = [TrainedTurn(1, 1, 3, 5.0, 1), TrainedTurn(3, 4, 6, 0.0, 2)]
    other = dataclasses.replace(played(0, [(5.0, 1), (0.0, 2)]), turns=turns, reward=6.0)
    assert [each.tolist() for each in token_rewards([one, other])] == [[0, 0, 5, 0, 0, 1], [0, 0, 6, 0, 0, 0]]


# --- conversations ----------------------------------------------------------------------------------------------------


def test_conversations_are_compared_within_their_role() -> None:
    samples = [
        played(0, [(0.0, 1)], conversation=0, credit=Credit(1.0, "pro")),
        played(0, [(0.0, 1)], conversation=1, credit=Credit(0.0, "con"), first=1),
        played(1, [(0.0, 1)], conversation=0, credit=Credit(0.0, "pro")),
        played(1, [(0.0, 1)], conversation=1, credit=Credit(0.5, "con"), first=1),
    ]
    assert np.asarray(advantages(samples, plain("episode"))).tolist() == [0.5, -0.25, -0.5, 0.25]
    assert of_turns(advantages(samples, plain("turn"))) == [[0.5], [-0.25], [-0.5], [0.25]]
    assert [each.sum() for each in token_rewards(samples)] == [1.0, 0.0, 0.0, 0.5]


def test_branches_of_one_conversation_count_once() -> None:
    credit = Credit(1.0)
    samples = [played(0, [(0.0, 1)], credit=credit), played(0, [(1.0, 2)], credit=credit, first=1)]
    samples.append(played(0, [(0.0, 1)], credit=Credit(0.0), conversation=1, first=2))
    assert np.asarray(advantages(samples, plain("episode"))).tolist() == [0.5, 0.5, -0.5]
