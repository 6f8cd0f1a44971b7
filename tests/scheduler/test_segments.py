"""Cases A, B and C, and budgets that hold whatever servers do."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Config
from penstock.scheduler.segments import AnswerState, SegmentPolicy
from penstock.types import FinishReason


def policy(**bounds: Any) -> SegmentPolicy:
    return SegmentPolicy(
        **{"segment_length": None, "max_segment_count": None, "global_max_length": None, "max_new_tokens": 100} | bounds
    )


def after(subject: SegmentPolicy, reason: FinishReason, turn: int, episode: int, segments: int) -> AnswerState:
    return subject.after(reason=reason, turn_tokens=turn, episode_tokens=episode, turn_segments=segments)


def test_the_bounds_come_from_the_configuration() -> None:
    config = Config.model_validate(
        {
            "env": {"max_new_tokens": 90},
            "scheduler": {"segment_length": 16, "max_segment_count": 4, "global_max_length": 128},
        }
    )
    assert SegmentPolicy.from_config(config, config.env) == policy(
        segment_length=16, max_segment_count=4, global_max_length=128, max_new_tokens=90
    )


def test_a_grant_is_the_least_of_what_is_left() -> None:
    assert policy().grant_tokens(num_tokens=30) == 100
    subject = policy(segment_length=40, global_max_length=250, max_segment_count=3)
    assert subject.grant_tokens(num_tokens=0) == 40
    assert subject.grant_tokens(num_tokens=240) == 10
    assert subject.tokens_left(num_tokens=85, turn_tokens=85) == 15
    assert subject.tokens_left(num_tokens=0) == 100, "in several segments"
    assert subject.grant_tokens(num_tokens=300) == 0
    assert policy(segment_length=40, max_segment_count=2).max_turn_tokens == 80


@pytest.mark.parametrize(
    ("reason", "turn", "episode", "segments", "state"),
    [
        ("stop", 25, 125, 0, "finished"),
        ("stop", 90, 200, 3, "finished"),
        ("length", 30, 130, 1, "cut"),
        ("abort", 20, 20, 0, "cut"),
        ("length", 30, 200, 1, "truncated"),
        ("abort", 30, 200, 1, "truncated"),
        ("length", 90, 150, 3, "truncated"),
        ("abort", 90, 150, 2, "truncated"),
        ("length", 100, 150, 2, "truncated"),
    ],
)
def test_after_a_segment(reason: FinishReason, turn: int, episode: int, segments: int, state: str) -> None:
    subject = policy(segment_length=30, max_segment_count=3, global_max_length=200)
    assert after(subject, reason, turn, episode, segments) == state


BOUND = st.one_of(st.none(), st.integers(1, 60))


@given(
    segment_length=BOUND,
    max_segment_count=st.one_of(st.none(), st.integers(1, 6)),
    global_max_length=BOUND,
    max_new_tokens=st.integers(1, 60),
    answers=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_budgets_hold_whatever_servers_do(answers: list[int], seed: int, **bounds: Any) -> None:
    """Plays turns of given lengths; servers give way at random, also before the first token."""
    subject, chance = policy(**bounds), random.Random(seed)
    generated = 0
    for answer in answers:
        turn = segments = 0
        while True:
            left_of_turn = subject.tokens_left(num_tokens=generated, turn_tokens=turn)
            granted = min(subject.grant_tokens(num_tokens=generated), left_of_turn)
            assert granted >= 1, "asked only while something is left"
            tokens = min(granted, answer - turn)
            reason: FinishReason = "stop" if tokens == answer - turn else "length"
            if chance.random() < 0.4:
                tokens, reason = chance.randrange(tokens), "abort"
            turn, generated, segments = turn + tokens, generated + tokens, segments + (reason == "length")
            state = after(subject, reason, turn, generated, segments)
            if state != "cut":
                break
        assert turn <= subject.max_turn_tokens <= subject.max_new_tokens
        if subject.segment_length and subject.max_segment_count:
            assert turn <= subject.segment_length * subject.max_segment_count
        if subject.global_max_length:
            assert generated <= subject.global_max_length
        left = (subject.global_max_length or 10**6) - (generated - turn)
        if answer < min(subject.max_turn_tokens, left):
            assert state == "finished" and turn == answer
        if state == "truncated" or generated == subject.global_max_length:
            return


@pytest.mark.parametrize(
    ("bounds", "longest"),
    [
        ({}, 3 * 20),
        ({"segment_length": 4, "max_segment_count": 2}, 3 * 8),
        ({"segment_length": 4, "global_max_length": 15}, 15),
        ({"global_max_length": 1000}, 3 * 20),
    ],
)
def test_the_longest_episode_there_can_be(bounds: dict[str, int], longest: int) -> None:
    tree = {"env": {"max_turns": 3, "max_new_tokens": 20}, "scheduler": bounds}
    config = Config.model_validate(tree)
    assert SegmentPolicy.from_config(config, config.env).max_episode_tokens == longest
