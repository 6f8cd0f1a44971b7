"""Keys and values in blocks that running sequences and the prefix cache share, for devices with FlashAttention.

A sequence owns no memory of its own. Its *table* lists the blocks with its tokens, in order. Several tables may list
the same whole block: the samples of one prompt, and prompts that begin alike. The last block of a table, if it is not
full, is listed nowhere else, since its sequence writes to it.

A block is *used* once for each table that lists it, and once more if a node of the prefix cache has it. Blocks that
only nodes have are idle. They are evicted when a sequence needs a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import torch
from transformers import PreTrainedModel

from penstock.rollout.admission import Admission
from penstock.rollout.prefix_cache import Node, PrefixCache, RecordOf
from penstock.rollout.slot_memory import Kept
from penstock.rollout.slots import Ints, LayerSlots, head_shape

FLASH_BLOCK_TOKENS = 256
"""FlashAttention reads blocks of multiples of this many tokens."""
HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
FLASH_CAPABILITY = (8, 0)


def has_flash(model: PreTrainedModel) -> bool:
    """Return whether FlashAttention supports the model's device, dtype and head size."""
    _, head_dim = head_shape(model)
    return supports_flash(model.device, model.dtype, head_dim)


def supports_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether FlashAttention supports heads of this size and dtype on a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < FLASH_CAPABILITY:
        return False
    return has_flash_form(dtype, head_dim)


def has_flash_form(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether FlashAttention supports heads of this size and dtype on the devices that it knows."""
    return dtype in HALVES and head_dim % 8 == 0 and head_dim <= LARGEST_HEAD


class SharedPrefixes(PrefixCache):
    """A prefix cache with blocks 1..n that tables may list too."""

    def __init__(self, num_blocks: int, *, block_tokens: int, num_kept: int) -> None:
        """`num_kept`: maximum number of idle blocks."""
        self._uses = [0] * (num_blocks + 1)
        self._nodes: dict[int, Node] = {}
        """The nodes, by their block."""
        super().__init__(num_blocks, block_tokens=block_tokens)
        self._free = list(range(num_blocks, 0, -1))
        self.restrict(num_kept)

    @property
    def num_cached(self) -> int:
        return len(self._nodes)

    @property
    def num_available(self) -> int:
        """Number of blocks that `take` can return."""
        return len(self._free) + self._num_evictable

    def num_used(self, path: Sequence[Node]) -> int:
        """Return how many blocks of a path are in tables."""
        return sum(self._uses[node.block] > 1 for node in path)

    def clear(self) -> None:
        """Forget all tokens. Tables keep their blocks."""
        for block in self._nodes:
            self._release(block)
        self._nodes.clear()
        self._forget_nodes()

    def take(self, count: int) -> list[int]:
        """Return blocks for a table, at most `num_available`."""
        while len(self._free) < count:
            self._evict(self._last())
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._uses[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Count one more table for used blocks and for blocks of nodes."""
        for block in blocks:
            self._uses[block] += 1
            if self._uses[block] == 2 and (node := self._nodes.get(block)) is not None:
                self._protect(node)

    def drop(self, blocks: Sequence[int]) -> None:
        """Count one table less for each block of a table."""
        for block in reversed(blocks):  # so that a node becomes idle before its ancestors
            self._release(block)
            if self._uses[block] == 1 and (node := self._nodes.get(block)) is not None:
                self._expose(node)
        self.restrict(self._limit)

    def adopt(self, token_ids: Sequence[int], table: Sequence[int], record: RecordOf | None) -> list[tuple[int, int]]:
        """Add the whole blocks of `token_ids`, which `table` lists, as nodes.

        Return the blocks that the cache has already, as pairs: number of the block in the table, block of the cache.
        With records of experts there are none, since equal tokens may have been computed by other experts. Then the
        cache exchanges a block without a record for one with a record."""
        found, node = list[tuple[int, int]](), self._root
        if not self._limit:
            return found
        for number, key in enumerate(self._keys(token_ids)):
            block, experts = table[number], self._recorded(record, number)
            child = node.children.get(key)
            if child is None:
                child = self._child(node, key, block, experts)
                self._attach(child)
            elif child.experts is None and experts is not None:
                self._detach(child)
                child.block, child.experts = block, experts
                self._attach(child)
            elif child.block != block and record is None:
                found.append((number, child.block))
            node = child
        return found

    def can_keep(self, num_tokens: int) -> bool:
        return num_tokens <= self._limit * self.block_tokens

    def has(self, block: int) -> bool:
        """Return whether a node has a block."""
        return block in self._nodes

    def restrict(self, num_blocks: int) -> None:
        """Keep at most this many idle blocks from now on."""
        self._limit = num_blocks
        while self._num_evictable > num_blocks:
            self._evict(self._last())

    def _use(self, path: Sequence[Node]) -> None:
        for node in reversed(path):
            if node in self._by_age:
                self._by_age.move_to_end(node)

    def _attach(self, node: Node) -> None:
        """Count a node that gets the block of a table."""
        self._uses[node.block] += 1
        self._nodes[node.block] = node

    def _detach(self, node: Node) -> None:
        del self._nodes[node.block]
        self._protect(node)
        self._release(node.block)

    def _release(self, block: int) -> None:
        self._uses[block] -= 1
        if not self._uses[block]:
            self._free.append(block)

    def _evict(self, last: Node) -> int:
        """Forget an idle node with all that follow it. Return its block."""
        assert last.parent is not None
        del last.parent.children[last.key]
        forgotten = [last]
        while forgotten:
            node = forgotten.pop()
            forgotten += node.children.values()
            self._detach(node)
            self._shorten(node, last.parent)
            self.num_evicted += 1
        return last.block


class BlockMemory:
    """Keys and values `[layers, N + 1, 2, K, B, D]` of N blocks with B tokens, and the tables of all rows.

    Tables list blocks from 1 on. Block 0 fills them up, and padding is written to it."""

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, max_context: int, num_tokens: int, num_cached: int | None
    ) -> None:
        """Allocate blocks for `num_tokens` tokens with the model's shape, dtype and device. `num_cached`: maximum
        number of tokens that are kept for later prompts alone; None for all."""
        config, block_tokens = model.config.get_text_config(), FLASH_BLOCK_TOKENS
        self.num_blocks = -(-num_tokens // block_tokens)
        num_kept = self.num_blocks if num_cached is None else num_cached // block_tokens
        self.prefixes = SharedPrefixes(self.num_blocks, block_tokens=block_tokens, num_kept=num_kept)
        self.block_tokens, self.device, self._dtype = block_tokens, model.device, model.dtype
        num_heads, head_dim = head_shape(model)
        self._shape = (config.num_hidden_layers, self.num_blocks + 1, 2, num_heads, block_tokens, head_dim)
        self.tables: Ints = np.zeros((num_slots, -(-max_context // block_tokens)), dtype=np.int64)
        """The table of each row, filled up with 0."""
        self._lengths: Ints = np.zeros(num_slots, dtype=np.int64)
        """Number of blocks in each table."""
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory, filled with zeros."""
        self._data = torch.zeros(self._shape, dtype=self._dtype, device=self.device)

    def free(self) -> None:
        """Free the memory, of which no row uses anything. It must not be read or written before `allocate`."""
        self._data = torch.empty(0, dtype=self._dtype, device=self.device)

    def layer(self, index: int) -> LayerSlots:
        """Return keys and values of a layer, each [N + 1, K, B, D]."""
        return LayerSlots(*self._data[index].unbind(1))

    def num_free(self, positions: Ints) -> int:
        """Return how many blocks are left when each row has room for the token at its position; negative if they are
        too few."""
        return self.prefixes.num_available - int(self._lacking(positions).sum())

    def needs(self, num_tokens: int, prefix: Sequence[Node]) -> tuple[int, int]:
        """Return how many blocks the first sample of a prompt needs, and each other one."""
        whole, is_partial = divmod(num_tokens, self.block_tokens)
        return whole + bool(is_partial) - self.prefixes.num_used(prefix), int(bool(is_partial))

    def begin(self, positions: Ints, num_decode: int, admissions: Sequence[Admission]) -> None:
        """Make room for the tokens of a step. Rows from `num_decode` on are those of the admissions."""
        for admission in admissions:  # before anything is evicted
            self.prefixes.hold([node.block for node in admission.prefix])
        for row in np.flatnonzero(self._lacking(positions[:num_decode])).tolist():
            self._extend(row, 1)
        row = num_decode
        for admission in admissions:
            num_tokens, prefix = len(admission.prompt_ids), [node.block for node in admission.prefix]
            self._set(row, prefix)
            self._extend(row, -(-num_tokens // self.block_tokens) - len(prefix))
            whole, is_partial = divmod(num_tokens, self.block_tokens)
            first = self.tables[row, :whole].tolist()
            for sibling in range(row + 1, row + admission.num_slots):
                self.prefixes.hold(first)
                self._set(sibling, first)
                self._extend(sibling, int(bool(is_partial)))
            row += admission.num_slots

    def share(self, num_decode: int, admissions: Sequence[Admission]) -> None:
        """Copy the last block of each computed prompt, if it is not full, for its other samples."""
        source, target, row = list[int](), list[int](), num_decode
        for admission in admissions:
            place, is_partial = divmod(len(admission.prompt_ids), self.block_tokens)
            if is_partial:
                siblings = self.tables[row + 1 : row + admission.num_slots, place].tolist()
                source += self.tables[row, [place] * len(siblings)].tolist()
                target += siblings
            row += admission.num_slots
        if target:
            where = torch.tensor([source, target], device=self.device)
            for layer in self._data:  # one at a time, to need little memory
                layer[where[1]] = layer[where[0]]

    @property
    def num_reserved_bytes(self) -> int:
        """Memory that the rows take. Blocks that several rows share count once."""
        num_blocks = int((np.unique(self.tables) > 0).sum())
        return num_blocks * int(prod(self._shape[2:])) * int(self._shape[0]) * self._dtype.itemsize

    def keep(self, kept: Iterable[Kept]) -> None:
        """Add the tokens of rows to the prefix cache. Rows with tokens that it has already share its blocks."""
        for row, token_ids, record in kept:
            for place, block in self.prefixes.adopt(token_ids, self.tables[row].tolist(), record):
                own = int(self.tables[row, place])
                rows = np.flatnonzero(self.tables[:, place] == own).tolist()
                self.tables[rows, place] = block
                self.prefixes.hold([block] * len(rows))
                self.prefixes.drop([own] * len(rows))

    def leave(self, rows: Iterable[int]) -> None:
        """End the use of blocks by rows."""
        for row in rows:
            self.prefixes.drop(self.tables[row, : self._lengths[row]].tolist())
            self._set(row, [])

    def move(self, source: Ints, target: Ints, num_rows: int, lengths: Ints) -> None:
        """Move the tables of rows, of which the first `num_rows` remain."""
        for array in (self.tables, self._lengths):
            array[target] = array[source]
            array[num_rows:] = 0

    def erase(self, rows: Sequence[int]) -> None:
        """Zero what only these rows use after non-finite values, so that no other sequence gets a NaN."""
        own = np.setdiff1d(self.tables[rows], np.delete(self.tables, rows, axis=0)).tolist()
        self._data[:, [block for block in own if not self.prefixes.has(block)]] = 0

    def _lacking(self, positions: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which rows have no block for the token at their position."""
        lacking: np.ndarray[tuple[int], np.dtype[np.bool_]]
        lacking = positions // self.block_tokens >= self._lengths[: len(positions)]
        return lacking

    def _set(self, row: int, blocks: Sequence[int]) -> None:
        self.tables[row] = 0
        self.tables[row, : len(blocks)] = blocks
        self._lengths[row] = len(blocks)

    def _extend(self, row: int, count: int) -> None:
        start = int(self._lengths[row])
        self.tables[row, start : start + count] = self.prefixes.take(count)
        self._lengths[row] = start + count
