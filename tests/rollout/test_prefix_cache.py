"""The tree of cached tokens against a pool that remembers what was written into each block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rollout.prefix_cache import BLOCK_TOKENS, Node, PrefixCache

tokens = st.lists(st.integers(0, 1), max_size=6).map(lambda blocks: [each for each in blocks for _ in range(9)])
"""Nine equal tokens in a row, so that many beginnings are shared and few end with a block."""


def whole_blocks(token_ids: Sequence[int]) -> int:
    return len(token_ids) // BLOCK_TOKENS


class Pool:
    """A cache, and for each block of its pool the tokens up to its end."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = PrefixCache(num_blocks)
        self.written: dict[int, list[int]] = {}

    def add(self, token_ids: list[int]) -> int:
        """Return the number of written blocks."""
        written = self.cache.add(token_ids)
        for place, block in written:
            assert 0 <= block < self.cache.num_blocks
            self.written[block] = token_ids[: (place + 1) * BLOCK_TOKENS]
        return len(written)

    def find(self, token_ids: list[int]) -> int:
        """Return the number of found tokens, which are the right ones."""
        path = self.cache.find(token_ids)
        for place, node in enumerate(path):
            assert self.written[node.block] == token_ids[: (place + 1) * BLOCK_TOKENS]
        return len(path) * BLOCK_TOKENS


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Whole blocks that both begin with."""
    shared = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return (min(len(one), len(other)) if shared is None else shared) // BLOCK_TOKENS


@settings(deadline=None)
@given(st.lists(tokens), tokens)
def test_the_longest_cached_prefix_is_found_but_never_the_last_token(known: list[list[int]], prompt: list[int]) -> None:
    pool = Pool(1000)
    for each in known:
        pool.add(each)
    longest = max((common(each, prompt[:-1]) for each in known), default=0)
    assert pool.find(prompt) == longest * BLOCK_TOKENS
    distinct = {tuple(each[: (i + 1) * BLOCK_TOKENS]) for each in known for i in range(whole_blocks(each))}
    assert pool.cache.num_cached == len(distinct) and pool.cache.num_evicted == 0


@settings(deadline=None)
@given(st.integers(0, 5), st.lists(st.tuples(st.booleans(), tokens)))
def test_evictions_leave_whole_prefixes_and_the_newest_tokens(
    num_blocks: int, calls: list[tuple[bool, list[int]]]
) -> None:
    pool = Pool(num_blocks)
    for is_added, token_ids in calls:
        if is_added:
            pool.add(token_ids)
            held = min(whole_blocks(token_ids), num_blocks) * BLOCK_TOKENS
            assert pool.find([*token_ids, 7]) == held, "the newest tokens are there"
        else:
            pool.find(token_ids)
        nodes = reachable(pool.cache._root)
        assert len(nodes) == pool.cache.num_cached <= num_blocks, "no child outlives its parent"
        assert len({node.block for node in nodes}) == len(nodes)
        if pool.cache._by_age:
            assert not next(iter(pool.cache._by_age)).children


def reachable(node: Node) -> list[Node]:
    below = [each for child in node.children.values() for each in (child, *reachable(child))]
    return below


def test_what_was_used_least_recently_goes_first() -> None:
    pool = Pool(4)
    one, two, three = ([number] * 2 * BLOCK_TOKENS for number in (1, 2, 3))
    pool.add(one)
    pool.add(two)
    pool.find([*one, 0])
    pool.add(three[:BLOCK_TOKENS])
    assert pool.find([*two, 0]) == BLOCK_TOKENS, "its end is dropped before its beginning"
    pool.find([*one, 0])
    pool.add(three)
    assert [pool.find([*each, 0]) // BLOCK_TOKENS for each in (one, two, three)] == [2, 0, 2]
    assert pool.cache.num_evicted == 2


def test_clearing_forgets_all() -> None:
    pool = Pool(4)
    pool.add([1] * 4 * BLOCK_TOKENS)
    pool.cache.clear()
    assert pool.find([1] * 4 * BLOCK_TOKENS) == pool.cache.num_cached == 0
    assert pool.add([1] * 4 * BLOCK_TOKENS) == 4


def test_a_prompt_with_records_ends_before_a_block_without_one() -> None:
    cache, prompt = PrefixCache(8), [1] * 4 * BLOCK_TOKENS
    rows = np.arange(len(prompt))[:, None]
    cache.add(prompt[: 3 * BLOCK_TOKENS], lambda start, end: rows[start:end] if start < 2 * BLOCK_TOKENS else None)
    found = {
        start: len(cache.find([*prompt, 1], routed_from=start)) for start in (0, 2 * BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    }
    assert found == {0: 2, 2 * BLOCK_TOKENS: 2, 3 * BLOCK_TOKENS: 3}
    assert len(cache.find([*prompt, 1])) == 3


def test_a_block_without_a_record_is_written_again_with_one() -> None:
    cache, prompt = PrefixCache(8), [1] * 3 * BLOCK_TOKENS
    rows = np.arange(len(prompt))[:, None]
    (_, first), (_, second) = cache.add(prompt[: 2 * BLOCK_TOKENS])
    written = cache.add(prompt, lambda start, end: rows[start:end])
    assert written[:2] == [(0, first), (1, second)] and len(written) == 3
    path = cache.find([*prompt, 1], routed_from=0)
    np.testing.assert_array_equal(np.concatenate([node.experts for node in path if node.experts is not None]), rows)
    assert cache.add(prompt, lambda start, end: rows[start:end]) == []
