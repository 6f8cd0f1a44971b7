"""What the prefix cache keeps for the prompts in the queue, and who is admitted."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import MAX_CONTEXT, VOCAB_SIZE, make_engine, make_request, sharing_blocks, weights

from penstock.rollout import admission
from penstock.rollout.prefix_cache import BLOCK_TOKENS, Node, PrefixCache, WaitingPrompt
from penstock.rollout.slot_engine import SlotEngine

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
    lambda found: [each for each in found for _ in range(9)]
)
"""Nine equal tokens in a row, so that many beginnings are shared and few end with a block."""
calls = st.lists(
    st.tuples(st.sampled_from(["add", "add", "expect", "expect", "forget", "find", "restrict", "clear"]), tokens)
)


def whole_blocks(token_ids: Sequence[int]) -> int:
    return len(token_ids) // BLOCK_TOKENS


def check(cache: PrefixCache) -> None:
    """Check that the tree and its waiting prompts agree."""
    ranks = dict[Node, list[float]]()
    for prompt in cache._prompts:
        path = cache._path(cache._keys(prompt.token_ids[:-1]))
        assert prompt.node is (path[-1] if path else cache._root)
        for node in path:
            ranks.setdefault(node, []).append(prompt.rank)
    nodes = below(cache._root)
    assert all(node.rank == min(ranks.get(node, [inf])) for node in nodes)
    assert sorted(node.block for node in nodes) == sorted({node.block for node in nodes})
    evictable = {*cache._by_age, *cache._awaited}
    assert evictable <= {*nodes}
    assert all(bool(node.prompts) == (node in cache._awaited) for node in evictable)
    listed = [prompt for node in (cache._root, *nodes) for prompts in node.ends.values() for prompt in prompts]
    assert len(listed) == len(cache._prompts) and {*listed} == {*cache._prompts}


def below(node: Node) -> list[Node]:
    return [each for child in node.children.values() for each in (child, *below(child))]


@settings(deadline=None)
@given(st.integers(0, 6), calls)
def test_the_cache_knows_what_each_waiting_prompt_begins_with(
    num_blocks: int, calls: list[tuple[str, list[int]]]
) -> None:
    cache, waiting = PrefixCache(num_blocks), list[WaitingPrompt]()
    for rank, (call, token_ids) in enumerate(calls):
        before, num_evicted = [each.num_cached for each in waiting], cache.num_evicted
        if call == "add":
            cache.add(token_ids)
            kept = [each.num_cached for each in waiting]
            assert kept[:1] >= before[:1], "the first prompt in the queue loses nothing to others"
            if any(now < then for now, then in zip(kept, before, strict=True)):
                path = cache._path(cache._keys(token_ids))
                assert {*cache._by_age} <= {*path}, "blocks that no prompt begins with go first"
                assert path and path[-1].prompts, "only a waiting prompt gets the block of another"
        elif call == "expect":
            waiting.append(cache.expect(token_ids, rank))
        elif call == "forget" and waiting:
            cache.forget(waiting.pop(rank % len(waiting)))
        elif call == "find":
            cache.find(token_ids)
        elif call == "restrict":
            cache.restrict(whole_blocks(token_ids))
        elif call == "clear":
            cache.clear()
            assert not any(each.num_cached for each in waiting)
        assert cache.num_cached == len(below(cache._root)) <= num_blocks
        assert cache.num_evicted - num_evicted <= num_blocks
        check(cache)


def block(number: int) -> list[int]:
    return [number] * BLOCK_TOKENS


def test_the_last_prompt_in_the_queue_loses_its_blocks_first() -> None:
    cache = PrefixCache(4)
    for number in (1, 2, 3):
        cache.add(block(number))
    first, second, third = (cache.expect([*block(number), 0], number) for number in (2, 1, 3))
    cache.add([*block(4), *block(5), *block(6)])
    assert cache.num_evicted == 0, "no prompt waits for these tokens, so only the free block is used"
    cache.restrict(3)
    cache.restrict(2)
    assert [each.num_cached for each in (first, second, third)] == [1, 1, 0]
    cache.restrict(1)
    assert [each.num_cached for each in (first, second, third)] == [0, 1, 0]
    cache.restrict(4)
    cache.add([*block(3), *block(7)])
    assert third.num_cached == 1, "a prompt in the queue finds what is computed later"


def test_a_forgotten_prompt_leaves_its_blocks_as_the_newest_ones() -> None:
    cache = PrefixCache(2)
    cache.add(block(1))
    cache.add(block(2))
    waiting = cache.expect([*block(1), 0], 0)
    cache.forget(waiting)
    cache.add(block(3))
    assert [len(cache.find([*block(number), 0])) for number in (1, 2, 3)] == [1, 0, 1]


def test_a_prompt_that_left_the_queue_protects_nothing() -> None:
    cache = PrefixCache(2)
    cache.add(block(1))
    early, late = (cache.expect([*block(1), 0], rank) for rank in (0, 5))
    first = cache.expect([*block(2), *block(3), 0], 1)
    cache.forget(early)
    cache.add([*block(2), *block(3)])
    assert (first.num_cached, late.num_cached) == (2, 0)


@pytest.fixture(params=[False, True], ids=["slots", "shared blocks"])
def _memory(request: pytest.FixtureRequest) -> Iterator[None]:
    with sharing_blocks(BLOCK_TOKENS) if request.param else nullcontext():
        yield


def play(engine: SlotEngine, *, episodes: int, turns: int, seed: int = 0) -> tuple[dict[str, list[int]], int]:
    """Play episodes without pauses. Return the tokens of each episode, and how many prompt tokens were reused."""
    numbers, reused = random.Random(seed), 0
    observed = {
        str(i): [[numbers.randrange(2, VOCAB_SIZE) for _ in range(20)] for _ in range(turns)] for i in range(episodes)
    }
    histories, next_turn = {rid: list[int]() for rid in observed}, dict.fromkeys(observed, 0)

    def submit(rid: str) -> None:
        histories[rid] += observed[rid][next_turn[rid]]
        next_turn[rid] += 1
        engine.submit(make_request(rid, list(histories[rid]), max_new_tokens=4, seeds=(next_turn[rid],)))

    for rid in observed:
        submit(rid)
    while engine.has_work:
        for finished in engine.step():
            assert finished.error is None
            rid = finished.request.rid
            histories[rid] += finished.segments[0].token_ids
            if next_turn[rid] < turns:
                submit(rid)
        reused += engine.num_reused
        check(engine._memory.prefixes)
    return histories, reused


@pytest.mark.usefixtures("_memory")
def test_a_long_queue_finds_its_prefixes_and_the_same_tokens() -> None:
    size = 2 * MAX_CONTEXT
    expected, _ = play(make_engine(num_slots=2, num_cached=0), episodes=8, turns=4)
    found, reused = play(make_engine(num_slots=2, num_tokens=2 * size), episodes=8, turns=4)
    assert found == expected
    possible = sum((20 + 24 * turn + 3) // BLOCK_TOKENS * BLOCK_TOKENS for turn in range(3)) * 8
    assert reused > possible / 3


@pytest.mark.usefixtures("_memory")
@settings(deadline=None, max_examples=10, derandomize=True)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([16, 48, 4096]),
    st.sampled_from([0, 32, 96, 1000]),
    st.integers(0, 99),
)
def test_every_episode_ends_whatever_the_cache_can_hold(
    num_slots: int, episodes: int, budget: int, num_cached: int, seed: int
) -> None:
    """Parts of a long prompt too find room, though the blocks belong to prompts that wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "PREFILL_TOKENS", budget)
        engine = make_engine(num_slots=num_slots, num_cached=num_cached)
        play(engine, episodes=episodes, turns=3, seed=seed)
    assert not engine._memory.prefixes._prompts


@pytest.mark.usefixtures("_memory")
def test_an_update_leaves_no_key_of_older_weights_to_the_queue() -> None:
    engine = make_engine(num_slots=1)
    history = [5] * 40
    for rid in ("a", "b", "c"):
        engine.submit(make_request(rid, history))
    engine.step()
    waiting = [*engine._memory.prefixes._prompts]
    assert [each.num_cached for each in waiting] == [2, 2]
    engine.load_weights(weights(1), 1)
    assert [each.num_cached for each in waiting] == [0, 0]
    check(engine._memory.prefixes)
    engine.retract()
    check(engine._memory.prefixes)
    engine.abort_all()
    assert not engine._memory.prefixes._prompts
