"""With little memory for keys and values, samples wait and are put back, and their tokens stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import (
    MAX_CONTEXT,
    VOCAB_SIZE,
    make_engine,
    make_model,
    make_request,
    run,
    sharing_blocks,
    weights,
)

from penstock.rollout import admission, room, slot_memory, slots
from penstock.rollout.request import GenerateRequest
from penstock.rollout.slot_engine import SlotEngine
from penstock.samples import Segment

NUM_SLOTS = 6
PLENTY = 2 * NUM_SLOTS * MAX_CONTEXT


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["slots", "shared blocks"])
def _memory(request: pytest.FixtureRequest) -> Iterator[None]:
    with sharing_blocks(16) if request.param else nullcontext(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "KEPT_BYTES", 0)
        patch.setattr(slots, "TRIM_BYTES", 0)
        patch.setattr(slot_memory, "TRIM_STEPS", 1)
        yield


request_sizes = st.tuples(st.integers(1, MAX_CONTEXT - 1), st.integers(1, 40), st.integers(1, 5))
"""Prompt tokens, answer tokens, samples."""


def requests_of(sizes: list[tuple[int, int, int]], seed: int) -> list[GenerateRequest]:
    """Requests of these sizes. Their prompts begin alike."""
    numbers = random.Random(seed)
    common = [numbers.randrange(2, VOCAB_SIZE) for _ in range(MAX_CONTEXT)]
    found = list[GenerateRequest]()
    for number, (num_prompt, num_answer, num_samples) in enumerate(sizes):
        prompt = [*common[: num_prompt // 2], *(numbers.randrange(2, VOCAB_SIZE) for _ in range(-(-num_prompt // 2)))]
        limits = tuple(numbers.randint(1, min(num_answer, MAX_CONTEXT - num_prompt)) for _ in range(num_samples))
        seeds = tuple(range(10 * number, 10 * number + num_samples))
        found.append(make_request(str(number), prompt, max_new_tokens=limits, seeds=seeds))
    return found


def assert_alike(found: dict[str, list[Segment]], expected: dict[str, list[Segment]]) -> None:
    assert found.keys() == expected.keys()
    for rid, segments in expected.items():
        for one, other in zip(found[rid], segments, strict=True):
            assert (one.token_ids, one.spans, one.finish_reason) == (other.token_ids, other.spans, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.lists(request_sizes, min_size=1, max_size=8),
    st.integers(MAX_CONTEXT, 3 * MAX_CONTEXT),
    st.sampled_from([0, 48, None]),
    st.sampled_from([16, 4096]),
    st.integers(0, 100),
)
def test_any_load_ends_with_the_tokens_of_an_engine_with_plenty_of_memory(
    sizes: list[tuple[int, int, int]], num_tokens: int, num_cached: int | None, budget: int, seed: int
) -> None:
    requests = requests_of(sizes, seed)
    expected = run(make_engine(num_slots=NUM_SLOTS, num_tokens=PLENTY), *requests)
    engine = make_engine(num_slots=NUM_SLOTS, num_tokens=num_tokens, num_cached=num_cached)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "PREFILL_TOKENS", budget)
        for request in requests:
            engine.submit(request)
        found = dict[str, list[Segment]]()
        for _ in range(bound(requests)):
            found |= {each.request.rid: each.segments for each in engine.step()}
            assert engine._num_free >= -NUM_SLOTS, "at most the blocks that the next step takes are lacking"
    assert not engine.has_work
    assert_alike(found, expected)


def bound(requests: list[GenerateRequest]) -> int:
    """Return more steps than any order of the samples needs, also if each is computed alone."""
    return sum((2 + limit) * 8 for request in requests for limit in request.max_new_tokens)


def test_the_youngest_sample_is_put_back_and_continues_with_the_same_tokens() -> None:
    requests = [make_request(name, [5, 6, 7], max_new_tokens=80, seeds=(seed,)) for seed, name in enumerate("abc")]
    engine = make_engine(num_slots=3, num_tokens=160)
    for request in requests:
        engine.submit(request)
    while not engine.num_put_back:
        assert engine.step() == []
    assert (engine.num_active, engine.num_started, engine.num_waiting) == (2, 3, 1)
    assert [len(engine.sequences(name)[0].token_ids) for name in "abc"] == [47, 47, 46]
    assert_alike(run(engine), run(make_engine(num_slots=3, num_tokens=PLENTY), *requests))


def test_a_sample_that_was_put_back_computes_its_keys_with_the_weights_of_then() -> None:
    engine = make_engine(num_slots=2, num_tokens=MAX_CONTEXT)
    for seed, name in enumerate("ab"):
        engine.submit(make_request(name, [5, 6, 7], max_new_tokens=80, seeds=(seed,)))
    for _ in range(10):
        engine.step()
    engine.load_weights(weights(1), 1)
    segments = run(engine)
    assert engine.num_put_back == 1
    first, second = (segments[name][0] for name in "ab")
    assert [span.policy_version for span in first.spans] == [span.policy_version for span in second.spans] == [0, 1]


def test_a_request_waits_until_its_prompt_and_some_room_fit() -> None:
    engine = make_engine(num_slots=4, num_tokens=128)
    engine.submit(make_request("a", [5] * 60, max_new_tokens=20))
    engine.submit(make_request("b", [6] * 60, max_new_tokens=20))
    engine.step()
    assert (engine.num_active, engine.num_waiting) == (1, 1), "4 blocks and 1 to grow for each, of 8"
    assert len(run(engine)) == 2 and engine.num_put_back == 0


def test_memory_for_less_than_one_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_bytes", lambda device: 2 * 256 * (MAX_CONTEXT - 1))
    with pytest.raises(ValueError, match=f"too little memory for one sequence: .*max_context={MAX_CONTEXT} tokens"):
        SlotEngine(make_model(), num_slots=4, max_context=MAX_CONTEXT)
    monkeypatch.setattr(room, "free_bytes", lambda device: 2 * 256 * MAX_CONTEXT)
    assert SlotEngine(make_model(), num_slots=4, max_context=MAX_CONTEXT).num_kv_tokens == MAX_CONTEXT
