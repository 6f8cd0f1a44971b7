"""Values that change shape lose nothing on the way."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.samples import (
    ROOT,
    Credit,
    Sample,
    Segment,
    TrainedTurn,
    Trajectory,
    Turn,
    VersionSpan,
    parent_of,
    path_to,
    place_of,
)
from penstock.types import NO_VERSION, RECEIVE_S, AdaptersForm, EpisodeId, FinishReason, WeightsHandle

token_ids = st.integers(0, 2**31 - 1)
logprobs = st.floats(-50, 0, width=32)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    lengths = draw(st.lists(st.integers(1, 4), max_size=3))
    versions = draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)))
    starts = np.cumsum([0, *lengths]).tolist()
    reason: FinishReason = draw(st.sampled_from(["stop", "length", "abort"]))
    return Segment(
        token_ids=draw(st.lists(token_ids, min_size=starts[-1], max_size=starts[-1])),
        logprobs=draw(st.lists(logprobs, min_size=starts[-1], max_size=starts[-1])),
        spans=[VersionSpan(v, a, a + n) for v, a, n in zip(versions, starts, lengths, strict=False)],
        finish_reason=reason,
    )


turns = st.builds(Turn, observation_ids=st.lists(token_ids, max_size=4), segments=st.lists(segments(), max_size=3))


def fields(sample: Sample) -> dict[str, Any]:
    return {
        name: (value.dtype, value.tolist()) if isinstance(value := getattr(sample, name), np.ndarray) else value
        for name in Sample.__dataclass_fields__
    }


@given(
    turns=st.lists(turns, max_size=4),
    reward=st.floats(-10, 10),
    ended=st.sampled_from(["completed", "truncated", None]),
)
def test_a_flattened_trajectory_comes_back(turns: list[Turn], reward: float, ended: Any) -> None:
    episode = EpisodeId("train", 7, 3, 1)
    facts: dict[str, Any] = {"status": ended or "aborted", "temperature": 0.7}
    whole = Trajectory(episode=episode, task_id="t", turns=turns, reward=reward, **facts)
    flat = whole.flatten()
    again = Trajectory.unflatten([flat], episode=episode, task_id="t", ended=ended is not None)
    assert fields(again.flatten()) == fields(flat)
    assert again.status == whole.status
    for name in ("prompt_tokens", "response_tokens", "version_min", "version_max"):
        assert getattr(again.summary(), name) == getattr(whole.summary(), name)
    for turn in again.turns:
        for segment in turn.segments:
            ends = [span.end for span in segment.spans]
            assert [span.start for span in segment.spans] == [0, *ends[:-1]] and ends[-1] == len(segment.token_ids)
    said = [[segment.token_ids for segment in turn.segments if segment.token_ids] for turn in turns]
    assert [[segment.token_ids for segment in turn.segments] for turn in again.turns] == said


def part(sample: Sample, start: int, end: int) -> Sample:
    return replace(
        sample,
        token_ids=sample.token_ids[start:end],
        loss_mask=sample.loss_mask[start:end],
        logprobs=sample.logprobs[start:end],
        versions=sample.versions[start:end],
    )


@given(turn=turns, cuts=st.lists(st.integers(0, 60), max_size=4))
def test_joined_pieces_are_the_whole(turn: Turn, cuts: list[int]) -> None:
    episode = EpisodeId("train", 7, 3, 1)
    whole = Trajectory(episode=episode, task_id="t", turns=[turn], reward=0.5, status="truncated").flatten()
    (place,) = whole.turns
    whole = replace(whole, turns=[place._replace(cuts=())])
    length = len(whole.token_ids)
    bounds = [0, *sorted(min(cut, length) for cut in cuts)]
    begun = replace(whole, reward=0.0, truncated=False)
    pieces = [part(begun, start, end) for start, end in pairwise(bounds)]
    pieces.append(part(whole, bounds[-1], length))
    joined = Sample.joined(pieces)
    inside = sorted({bound - place.start for bound in bounds if place.start < bound < place.end})
    assert joined.turns[0].cuts == tuple(inside)
    assert fields(replace(joined, turns=whole.turns)) == fields(whole)


def test_a_saved_single_turn_is_one_turn() -> None:
    cut = [
        Segment(token_ids=[5, 6], logprobs=[-1.0, -2.0], spans=[VersionSpan(3, 0, 2)], finish_reason="length"),
        Segment(token_ids=[7], logprobs=[-3.0], spans=[VersionSpan(4, 0, 1)], finish_reason="abort"),
    ]
    episode = EpisodeId("train", 0, 0, 0)
    turn = Turn(observation_ids=[1, 2], segments=cut)
    whole = Trajectory(episode=episode, task_id="t", turns=[turn], reward=0.0, status="completed")
    again = Trajectory.unflatten([whole.flatten()], episode=episode, task_id="t", ended=False)
    (turn,) = again.turns
    assert turn.observation_ids == [1, 2]
    assert [(segment.token_ids, segment.logprobs, segment.spans) for segment in turn.segments] == [
        (segment.token_ids, segment.logprobs, segment.spans) for segment in cut
    ]


def test_a_prompt_without_an_answer_is_one_open_turn() -> None:
    episode = EpisodeId("train", 0, 0, 0)
    turn = Turn(observation_ids=[1, 2], segments=[])
    whole = Trajectory(episode=episode, task_id="t", turns=[turn], reward=0.0, status="completed")
    assert Trajectory.unflatten([whole.flatten()], episode=episode, task_id="t", ended=False).turns == [
        replace(turn, state=turn.state_hash)
    ]


def test_a_turn_keeps_its_reward_its_state_and_what_is_trained_of_it() -> None:
    """In its samples, and when they are read again. What the episode earned beyond its turns counts at the end."""
    said = Segment(token_ids=[7, 8], logprobs=[-1.0, -2.0], spans=[VersionSpan(3, 0, 2)], finish_reason="stop")
    turns = [
        Turn(observation_ids=[1, 2], segments=[said], reward=0.25, state=99, trained=[False, True]),
        Turn(observation_ids=[1, 2], segments=[said]),
        Turn(observation_ids=[5], segments=[]),
    ]
    whole = Trajectory(episode=EpisodeId("train", 0, 0, 0), task_id="t", turns=turns, reward=1.0, status="completed")
    (sample,) = whole.formulate("branches")
    state = turns[1].state_hash
    assert list(sample.turns[:2]) == [TrainedTurn(0, 2, 4, 0.25, 99), TrainedTurn(1, 6, 8, 0.75, state)]
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 1, 1, 0]
    assert (sample.logprobs[2], sample.versions[2]) == (0.0, NO_VERSION)
    again = Trajectory.unflatten([sample], episode=whole.episode, task_id="t", ended=True)
    assert again.turns[0].token_ids == [7, 8] and again.turns[0].trained == [False, True]
    assert fields(again.flatten()) == fields(sample)


def test_conversations_have_their_own_credit() -> None:
    """The second one begins before the first one goes on."""
    said = Segment(token_ids=[7, 8], logprobs=[-1.0, -2.0], spans=[VersionSpan(3, 0, 2)], finish_reason="stop")
    turns = [Turn(observation_ids=[n], segments=[said], parent=parent) for n, parent in enumerate([ROOT, ROOT, 0])]
    credits = [Credit(0.5, "pro"), Credit(-0.5, "con")]
    episode = EpisodeId("train", 0, 0, 0)
    whole = Trajectory(episode=episode, task_id="t", turns=turns, reward=1.0, status="completed", credits=credits)
    assert whole.conversations() == [[0, 2], [1]]
    second, first = whole.formulate("branches")
    assert [(each.conversation, each.credit, each.reward) for each in (first, second)] == [
        (0, credits[0], 1.0),
        (1, credits[1], 1.0),
    ]
    assert [[turn.reward for turn in each.turns] for each in (first, second)] == [[0.0, 0.5], [-0.5]]
    again = Trajectory.unflatten([second, first], episode=episode, task_id="t", ended=True)
    assert (again.reward, list(again.credits)) == (1.0, credits)
    assert [turn.parent for turn in again.turns] == [None, ROOT, 0]
    assert [fields(each) for each in again.formulate("branches")] == [fields(each) for each in (second, first)]


@st.composite
def trees(draw: st.DrawFn) -> Trajectory:
    """An episode whose turns continue any earlier one, or none. Each token of it is another one."""
    drawn = draw(st.lists(turns, min_size=1, max_size=7))
    numbers = itertools.count()
    grown = [
        Turn(
            observation_ids=[next(numbers) for _ in turn.observation_ids],
            segments=[replace(part, token_ids=[next(numbers) for _ in part.token_ids]) for part in turn.segments],
            parent=draw(st.sampled_from([None, *range(ROOT, index)])),
        )
        for index, turn in enumerate(drawn)
    ]
    return Trajectory(episode=EpisodeId("train", 1, 2, 0), task_id="t", turns=grown, reward=1.0, status="completed")


def trained(samples: list[Sample]) -> list[tuple[int, float, int]]:
    """Every trained token with its log-probability and version."""
    return [
        (int(sample.token_ids[i]), float(sample.logprobs[i]), int(sample.versions[i]))
        for sample in samples
        for i in np.flatnonzero(sample.loss_mask)
    ]


def sampled(whole: Trajectory, indexes: Iterable[int]) -> list[tuple[int, float, int]]:
    return [
        (token, float(np.float32(logprob)), span.policy_version)
        for index in indexes
        for part in whole.turns[index].segments
        for span in part.spans
        for token, logprob in list(zip(part.token_ids, part.logprobs, strict=True))[span.start : span.end]
    ]


@given(whole=trees())
def test_whatever_the_tree_each_sampled_token_is_trained_at_most_once(whole: Trajectory) -> None:
    every = range(len(whole.turns))
    for formulation, indexes in (
        ("branches", every),
        ("step", every),
        ("trajectory", path_to(whole.turns, len(every) - 1)),
    ):
        samples = whole.formulate(formulation)  # type: ignore[arg-type]
        assert sorted(trained(samples)) == sorted(sampled(whole, indexes))
        for sample in samples:
            trail = [tokens for path in whole.branches() if (tokens := context(whole, path))]
            given_ids = sample.token_ids.tolist()
            assert any(given_ids == tokens[: len(given_ids)] for tokens in trail) or not given_ids
    for formulation in ("branches", "step"):
        overlaid = Sample.overlaid(whole.formulate(formulation))  # type: ignore[arg-type]
        assert fields(replace(overlaid, turns=())) == fields(replace(whole.flatten(), turns=()))


def context(whole: Trajectory, path: list[int]) -> list[int]:
    return [token for index in path for token in (*whole.turns[index].observation_ids, *whole.turns[index].token_ids)]


@given(whole=trees())
def test_saved_branches_come_back(whole: Trajectory) -> None:
    assume(all(turn.observation_ids for turn in whole.turns))  # a request adds something to what was said
    parents = {parent_of(whole.turns, index) for index in range(len(whole.turns))} - {ROOT}
    assume(all(whole.turns[parent].token_ids for parent in parents))  # and continues no empty answer
    saved = [sample for sample in whole.formulate("branches") if len(sample.token_ids)]
    again = Trajectory.unflatten(saved or whole.formulate("branches"), episode=whole.episode, task_id="t", ended=True)
    found = [fields(sample) for sample in again.formulate("branches")] if saved else []
    assert found == [fields(sample) for sample in saved]
    if whole.turns[-1].token_ids:
        assert fields(again.flatten()) == fields(whole.flatten())
        assert sorted(trained(again.formulate("step"))) == sorted(trained(whole.formulate("step")))


@given(data=st.data())
def test_a_saved_tree_keeps_its_parents(data: st.DataObject) -> None:
    """Whatever contexts repeat others: the parents are found as they were at first."""
    turns: list[Turn] = []
    continued: dict[int, list[int]] = {}
    for index in range(data.draw(st.integers(1, 6))):
        earlier = data.draw(st.sampled_from([ROOT, *range(index)]))
        context = [token for at in path_to(turns, earlier) for token in turns[at].observation_ids + turns[at].token_ids]
        prompt = context + data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=2))
        parent, known = place_of(prompt, turns, continued)
        said = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=2))
        span = VersionSpan(0, 0, len(said))
        part = Segment(token_ids=said, logprobs=[-1.0] * len(said), spans=[span], finish_reason="stop")
        turns.append(Turn(observation_ids=prompt[known:], segments=[part], parent=parent))
        continued.setdefault(parent, []).append(index)
    credits = [Credit(float(n)) for n in range(sum(turn.parent == ROOT for turn in turns))]
    episode = EpisodeId("train", 0, 0, 0)
    whole = Trajectory(episode=episode, task_id="t", turns=turns, reward=1.0, status="completed", credits=credits)
    again = Trajectory.unflatten(whole.formulate("branches"), episode=episode, task_id="t", ended=True)
    assert [parent_of(again.turns, n) for n in range(len(turns))] == [turn.parent for turn in turns]
    assert list(again.credits) == credits


def test_equal_answers_to_one_question_stay_two() -> None:
    said = Segment(token_ids=[7, 8], logprobs=[-1.0, -2.0], spans=[VersionSpan(3, 0, 2)], finish_reason="stop")
    turns = [Turn(observation_ids=[1, 2], segments=[said], parent=ROOT) for _ in range(2)]
    whole = Trajectory(episode=EpisodeId("train", 0, 0, 0), task_id="t", turns=turns, reward=1.0, status="completed")
    again = Trajectory.unflatten(whole.formulate("branches"), episode=whole.episode, task_id="t", ended=True)
    assert [turn.parent for turn in again.turns] == [None, ROOT]
    assert len(trained(again.formulate("branches"))) == 4


@given(turns=st.lists(turns, max_size=4))
def test_turns_as_samples_of_their_own(turns: list[Turn]) -> None:
    """Each is trained once, with all that came before as its prompt."""
    trajectory = Trajectory(
        episode=EpisodeId("train", 1, 2, 0), task_id="t", turns=turns, reward=1.0, status="completed"
    )
    whole, parts = trajectory.flatten(), trajectory.formulate("step")
    assert [fields(sample) for sample in trajectory.formulate("trajectory")] == [fields(whole)]
    assert len(parts) == max(len(turns), 1)
    trained = np.zeros_like(whole.loss_mask)
    for part in parts:
        length = len(part.token_ids)
        assert part.token_ids.tolist() == whole.token_ids[:length].tolist()
        here = part.loss_mask == 1
        assert not trained[:length][here].any()
        trained[:length] += part.loss_mask
        for column in ("logprobs", "versions"):
            assert getattr(part, column)[here].tolist() == getattr(whole, column)[:length][here].tolist()
    assert trained.tolist() == whole.loss_mask.tolist()


def test_large_weights_have_longer_to_arrive() -> None:
    def handle(num_bytes: float, base: WeightsHandle | None = None) -> WeightsHandle:
        form = AdaptersForm(base=base, rank=2, alpha=4, targets=()) if base else None
        return WeightsHandle(policy_version=1, path="", num_bytes=int(num_bytes), fingerprint="", adapters=form)

    assert handle(1e9).receive_limit_s == handle(10e9).receive_limit_s == RECEIVE_S
    assert handle(64e9).receive_limit_s > 64e9 / 125e6, "a network of 1 Gbit/s takes so long"
    assert handle(1e6, base=handle(64e9)).receive_limit_s > handle(64e9).receive_limit_s
