"""The prefix cache. It keeps the keys and values of earlier tokens for later prompts, as a tree of token blocks.

A path from the root spells the beginning of a prompt, one block of tokens per node. Each node owns one block of the
pool in `slots.SlotCache`. Samples copy blocks into their slot and slots back into blocks. So no block is in use between
two steps, and any block may be evicted. In `shared_blocks.SharedPrefixes`, samples use blocks in place.

The cache knows the prompts in the queue. First it evicts nodes that no waiting prompt begins with, the least recently
used one before the others. Then it evicts those that only the last prompts in the queue begin with. By age alone, a
long queue would never find its prefixes: the prompt that is next would have waited longest since its last turn.

Invariants:

* The keys and values of a node are those of its tokens after the tokens of all its ancestors.
* A node is evicted before its ancestors: it was used less recently, or a later prompt begins with it.
* Each waiting prompt is in the heaps of all nodes of its cached prefix, and is listed at the last one.
* A new block replaces a block that waiting prompts begin with only if an earlier prompt begins with the new one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

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
    depth: int = 0
    """Number of blocks from the root to its end."""
    children: dict[Key, Node] = field(default_factory=dict)
    prompts: list[WaitingPrompt] = field(default_factory=list)
    """A heap of the waiting prompts that begin with its path. Those that wait no longer are never on top."""
    ends: dict[Key, list[WaitingPrompt]] = field(default_factory=dict)
    """The waiting prompts with a cached prefix that ends here, by the block that follows; () if no whole block does."""

    @property
    def rank(self) -> float:
        """The lowest rank of the waiting prompts that begin with its path."""
        return self.prompts[0].rank if self.prompts else inf


@dataclass(slots=True, eq=False)
class WaitingPrompt:
    """A prompt in the queue."""

    token_ids: Sequence[int]
    rank: float
    """Its place in the queue, where prompts with lower ranks are before it."""
    node: Node
    """The last node of its cached prefix."""
    is_waiting: bool = True

    def __lt__(self, other: WaitingPrompt) -> bool:
        return self.rank < other.rank

    @property
    def num_cached(self) -> int:
        """Number of blocks of its cached prefix."""
        return self.node.depth


class PrefixCache:
    """Knows which block of a pool holds which tokens. It has no keys and values itself."""

    def __init__(self, num_blocks: int, *, block_tokens: int = BLOCK_TOKENS) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._limit = num_blocks
        self.num_evicted = 0
        """Number of blocks that were evicted for other tokens, so far."""
        self._prompts: dict[WaitingPrompt, None] = {}
        self._numbers = count()
        self.clear()

    def clear(self) -> None:
        """Forget all tokens. Waiting prompts remain."""
        self._forget_nodes()
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def _forget_nodes(self) -> None:
        self._root = Node()
        self._by_age: OrderedDict[Node, None] = OrderedDict()
        """The nodes that may be evicted and that no waiting prompt begins with, the least recently used one first."""
        self._awaited = set[Node]()
        """All other nodes that may be evicted."""
        self._by_rank = list[tuple[float, int, int, Node]]()
        """A heap with the node of the last rank on top, and the deepest of these. It has outdated entries too."""
        for prompt in self._prompts:
            self._list(prompt, self._root)

    @property
    def num_cached(self) -> int:
        """Number of blocks that hold tokens."""
        return self._num_evictable

    def blocks(self) -> set[int]:
        """Return the blocks that hold tokens."""
        return {node.block for node in (*self._by_age, *self._awaited)}

    def expect(self, token_ids: Sequence[int], rank: float) -> WaitingPrompt:
        """Add a prompt that waits in the queue. Its tokens and its rank must not change."""
        path = self._path(self._keys(token_ids[: len(token_ids) - 1]))
        prompt = WaitingPrompt(token_ids, rank, self._root)
        self._prompts[prompt] = None
        self._list(prompt, path[-1] if path else self._root)
        for node in path:
            heappush(node.prompts, prompt)
            if node.prompts[0] is prompt and self._protect(node):
                self._expose(node)
        return prompt

    def forget(self, prompt: WaitingPrompt) -> None:
        """Remove a prompt that waits no longer. Its cached prefix counts as used."""
        del self._prompts[prompt]
        node, key = prompt.node, self._next_key(prompt)
        node.ends[key].remove(prompt)
        if not node.ends[key]:
            del node.ends[key]
        prompt.is_waiting = False
        while node.parent is not None:
            was_first = node.prompts[0] is prompt
            while node.prompts and not node.prompts[0].is_waiting:
                heappop(node.prompts)
            if was_first and self._protect(node):
                self._expose(node)
            node = node.parent

    def can_keep(self, num_tokens: int) -> bool:
        """Return whether the cache can hold this many tokens."""
        return num_tokens <= self.num_blocks * self.block_tokens

    def restrict(self, num_blocks: int) -> None:
        """Hold at most this many blocks until the next call, and evict others."""
        self._limit = min(num_blocks, self.num_blocks)
        while self.num_cached > self._limit:
            self._free.append(self._evict(self._last()))

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
            block = self._free_block(node, keys[number], keep=keep)
            if block is None:
                break
            node = self._child(node, keys[number], block, self._recorded(record, number))
            if node.prompts:
                self._expose(node)
            path.append(node)
            written.append((number, block))
        self._use(path)
        return written

    def _child(self, node: Node, key: Key, block: int, experts: Record | None) -> Node:
        """Add a node with a block of tokens after those of `node`."""
        child = node.children[key] = Node(node, key, block, experts, node.depth + 1)
        for prompt in node.ends.pop(key, ()):
            heappush(child.prompts, prompt)
            self._list(prompt, child)
        return child

    def _list(self, prompt: WaitingPrompt, node: Node) -> None:
        """List a waiting prompt at the last node of its cached prefix."""
        prompt.node = node
        node.ends.setdefault(self._next_key(prompt), []).append(prompt)

    def _next_key(self, prompt: WaitingPrompt) -> Key:
        """Return the block after the cached prefix of a prompt, or () if its last token would be in it."""
        start = prompt.node.depth * self.block_tokens
        end = start + self.block_tokens
        return tuple(prompt.token_ids[start:end]) if end < len(prompt.token_ids) else ()

    @property
    def _num_evictable(self) -> int:
        return len(self._by_age) + len(self._awaited)

    def _expose(self, node: Node) -> None:
        """Let a node be evicted."""
        if not node.prompts:
            self._by_age[node] = None
            return
        self._awaited.add(node)
        if len(self._by_rank) > 2 * len(self._awaited):
            self._by_rank = [self._entry(each) for each in self._awaited]
            heapify(self._by_rank)
        else:
            heappush(self._by_rank, self._entry(node))

    def _protect(self, node: Node) -> bool:
        """Do not let a node be evicted. Return whether it could be."""
        could = node in self._awaited or node in self._by_age
        self._awaited.discard(node)
        self._by_age.pop(node, None)
        return could

    def _entry(self, node: Node) -> tuple[float, int, int, Node]:
        return -node.rank, -node.depth, next(self._numbers), node

    def _last(self) -> Node:
        """Return the node that is evicted next. Raises IndexError if there is none."""
        if self._by_age:
            return next(iter(self._by_age))
        while True:
            rank, _, _, node = self._by_rank[0]
            if node in self._awaited and node.rank == -rank:
                return node
            heappop(self._by_rank)

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
            if not node.prompts:
                self._by_age[node] = None
                self._by_age.move_to_end(node)

    def _free_block(self, node: Node, key: Key, *, keep: Node) -> int | None:
        """Return a block for the tokens `key` after those of `node`. Evict a node if there is none without tokens.

        Return None if this were `keep`, or a node that an earlier prompt begins with."""
        if self.num_blocks - len(self._free) < self._limit:
            return self._free.pop()
        if not self._num_evictable:
            return None
        last, rank = self._last(), min((prompt.rank for prompt in node.ends.get(key, ())), default=inf)
        return None if last is keep or (last.prompts and last.rank <= rank) else self._evict(last)

    def _evict(self, last: Node) -> int:
        """Forget a node without children, and return its block."""
        assert last.parent is not None
        self._protect(last)
        del last.parent.children[last.key]
        self._shorten(last, last.parent)
        self.num_evicted += 1
        return last.block

    def _shorten(self, forgotten: Node, node: Node) -> None:
        """List the prompts with a cached prefix that ended at a forgotten node at `node`, where it ends without it."""
        for prompts in forgotten.ends.values():
            for prompt in prompts:
                self._list(prompt, node)

    def _keys(self, token_ids: Sequence[int]) -> list[Key]:
        """Return the whole blocks of `token_ids`."""
        size = self.block_tokens
        return [tuple(token_ids[start : start + size]) for start in range(0, len(token_ids) // size * size, size)]

    def _recorded(self, record: RecordOf | None, number: int) -> Record | None:
        return None if record is None else record(number * self.block_tokens, (number + 1) * self.block_tokens)
