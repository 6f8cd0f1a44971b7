"""The prefix cache. It keeps the keys and values of earlier tokens for later prompts, as a tree of token blocks.

A path from the root spells the beginning of a prompt, one block of tokens per node. Each node owns one block of the
pool in `slots.SlotCache`. Samples copy blocks into their slot and slots back into blocks. So no block is in use between
two steps, and any block may be evicted. In `shared_blocks.SharedPrefixes`, samples use blocks in place.

Invariants:

* The keys and values of a node are those of its tokens after the tokens of all its ancestors.
* A node was used less recently than its ancestors. So the least recently used node has no children.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.routed_experts import Record

BLOCK_TOKENS = 16
"""Tokens of a block. At most this many tokens of a known prompt are computed again. Smaller blocks take longer to find
and to copy."""

CACHED_SHARE = 1.0
"""Tokens that the cache can hold, for each token that the slots can hold. This is room for about as many unfinished
episodes as there are slots. With less, the oldest blocks are those of the episode that continues next."""

Key = tuple[int, ...]
"""The tokens of a block."""
RecordOf = Callable[[int, int], Record | None]
"""Returns the experts that computed the tokens [start, end), or None if they were not recorded."""


@dataclass(slots=True, eq=False)
class Node:
    """A block of tokens that follows the tokens of its ancestors."""

    parent: Node | None = None
    """None for the root, which has no tokens."""
    key: Key = ()
    block: int = -1
    """Its block of the pool."""
    experts: Record | None = None
    """The experts that computed its keys and values, [B, width]. None: they were not recorded."""
    children: dict[Key, Node] = field(default_factory=dict)


class PrefixCache:
    """Knows which block of a pool holds which tokens. It has no keys and values itself."""

    def __init__(self, num_blocks: int, *, block_tokens: int = BLOCK_TOKENS) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._limit = num_blocks
        self.num_evicted = 0
        """Number of blocks that were evicted for other tokens, so far."""
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self._root = Node()
        self._by_age: OrderedDict[Node, None] = OrderedDict()
        """All nodes except the root, the least recently used one first."""
        self._free = list(range(self.num_blocks - 1, -1, -1))

    @property
    def num_cached(self) -> int:
        """Number of blocks that hold tokens."""
        return len(self._by_age)

    def blocks(self) -> set[int]:
        """Return the blocks that hold tokens."""
        return {node.block for node in self._by_age}

    def can_keep(self, num_tokens: int) -> bool:
        """Return whether the cache can hold this many tokens."""
        return num_tokens <= self.num_blocks * self.block_tokens

    def restrict(self, num_blocks: int) -> None:
        """Hold at most this many blocks until the next call. The least recently used ones are evicted for it."""
        self._limit = min(num_blocks, self.num_blocks)
        while self.num_cached > self._limit:
            self._free.append(self._evict(next(iter(self._by_age))))

    def find(self, token_ids: Sequence[int], *, routed_from: int | None = None) -> list[Node]:
        """Return the path of the longest cached prefix that leaves at least the last of `token_ids` to compute.

        With `routed_from`, the path ends before a block that lacks the record of a token from this position on."""
        path = self._path(self._keys(token_ids[: len(token_ids) - 1]))
        if routed_from is not None:
            known = routed_from // self.block_tokens
            while known < len(path) and path[known].experts is not None:
                known += 1
            path = path[:known]
        self._use(path)
        return path

    def add(self, token_ids: Sequence[int], record: RecordOf | None = None) -> list[tuple[int, int]]:
        """Add the whole blocks of `token_ids`, the first ones if the pool is too small for all.

        Return the blocks to write, as pairs: number of the block in `token_ids`, block of the pool. A block that is
        cached without a record of its experts is written again if `record` knows them."""
        keys = self._keys(token_ids)
        path = self._path(keys)
        self._use(path)
        written = list[tuple[int, int]]()
        for number, node in enumerate(path):
            if node.experts is None and (experts := self._recorded(record, number)) is not None:
                node.experts = experts
                written.append((number, node.block))
        node = keep = path[-1] if path else self._root
        for number in range(len(path), len(keys)):
            block = self._free_block(keep=keep)
            if block is None:
                break
            child = Node(node, keys[number], block, self._recorded(record, number))
            node.children[child.key] = child
            path.append(child)
            written.append((number, block))
            node = child
        self._use(path)
        return written

    def _path(self, keys: Sequence[Key]) -> list[Node]:
        """Return the nodes of the longest cached prefix."""
        path, node = list[Node](), self._root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _use(self, path: Sequence[Node]) -> None:
        """Make the nodes of a path the most recently used ones, its first node the last of them."""
        for node in reversed(path):
            self._by_age[node] = None
            self._by_age.move_to_end(node)

    def _free_block(self, *, keep: Node) -> int | None:
        """Return a block without tokens. Evict the least recently used node if there is none, but not `keep`; then
        return None."""
        if self.num_blocks - len(self._free) < self._limit:
            return self._free.pop()
        oldest = next(iter(self._by_age), keep)
        return None if oldest is keep else self._evict(oldest)

    def _evict(self, oldest: Node) -> int:
        """Forget the least recently used node, and return its block."""
        assert oldest.parent is not None
        del self._by_age[oldest]
        del oldest.parent.children[oldest.key]
        self.num_evicted += 1
        return oldest.block

    def _keys(self, token_ids: Sequence[int]) -> list[Key]:
        """Return the whole blocks of `token_ids`."""
        size = self.block_tokens
        return [tuple(token_ids[start : start + size]) for start in range(0, len(token_ids) // size * size, size)]

    def _recorded(self, record: RecordOf | None, number: int) -> Record | None:
        return None if record is None else record(number * self.block_tokens, (number + 1) * self.block_tokens)
