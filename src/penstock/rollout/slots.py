"""KV slots: keys and values of every layer. Each sequence that is being generated has one slot.

Beside the slots there is a pool of blocks, for the keys and values of prefixes that later prompts may begin with. In
main memory, slots and pool take only the pages that were written to, and pages that are not needed are given back. So a
slot of any length costs what its sequence needs.

Active sequences occupy slots 0..n-1 without holes, so a step reads no other slot. `regroup` also keeps sequences of
similar length together. Attention pads a group of rows to its longest row. With long-tailed lengths, padding all rows
to the longest of all would dominate the step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from penstock.rollout.lazy_zeros import LazyZeros
from penstock.rollout.prefix_cache import BLOCK_TOKENS

Ints = npt.NDArray[np.int64]

KEPT_BYTES, TRIM_BYTES = 2**27, 2**24
"""Memory that is always kept, and the least that is given back: to give pages back and provide them again takes time.
For the same reason an eighth of what is needed is kept."""
GROUP_ROWS = 32
"""Rows that share one attention call: small enough to keep padding low, large enough to keep calls few."""


class BlockCopy(NamedTuple):
    """A copy between a slot and the pool."""

    slot: int
    place: int
    """Number of the block in the slot."""
    block: int
    """Number of the block in the pool."""


class LayerSlots(NamedTuple):
    """One layer of the cache."""

    keys: torch.Tensor  # [S, K, C, D]
    values: torch.Tensor  # [S, K, C, D]


class SlotCache:
    """Keys and values of all layers, each `[layers, S, K, C, D]` (dimensions as in `slot_attention`), and the pool."""

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_context: int, num_blocks: int) -> None:
        """Allocate slots and a pool of `num_blocks` blocks with the model's shape, dtype and device."""
        self.num_kv_heads, self.head_dim = head_shape(model)
        self.max_context, self.dtype, self.device = max_context, model.dtype, model.device
        num_layers = model.config.get_text_config().num_hidden_layers
        self.is_lazy = self.device.type == "cpu"
        """Whether only what was written takes memory."""
        if self.is_lazy:  # each head of a slot begins with a page
            max_context += -max_context % self._tokens_per_page
        self._shape = (2, num_layers, num_slots, self.num_kv_heads, max_context, self.head_dim)
        self._pool_shape = (num_blocks, 2, num_layers, self.num_kv_heads, BLOCK_TOKENS, self.head_dim)
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory, filled with zeros."""
        # Zeros, not empty: masked positions are multiplied by 0, and 0 times an uninitialised NaN is NaN.
        self._lazy: list[LazyZeros] = []
        both = self._zeros(self._shape)
        self._keys, self._values = both
        whole = self._shape[-2] // BLOCK_TOKENS
        self._blocks = both[..., : whole * BLOCK_TOKENS, :].view(*self._shape[:4], whole, BLOCK_TOKENS, self.head_dim)
        """A view of the slots [2, layers, S, K, C // B, B, D], with B tokens per block."""
        self._pool = self._zeros(self._pool_shape)
        self._written: Ints = np.zeros(self._shape[2], dtype=np.int64)
        """Number of tokens of each slot that take memory."""
        self._saved = set[int]()
        """The blocks of the pool that take memory."""

    def _zeros(self, shape: Sequence[int]) -> torch.Tensor:
        if not self.is_lazy:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        self._lazy.append(LazyZeros(shape, self.dtype))
        return self._lazy[-1].tensor

    def free(self) -> None:
        """Free the memory. Slots and pool must not be read or written before the next `allocate`."""
        self._lazy = []
        nothing = torch.empty(0, dtype=self.dtype, device=self.device)
        self._keys = self._values = self._blocks = self._pool = nothing

    def layer(self, index: int) -> LayerSlots:
        return LayerSlots(self._keys[index], self._values[index])

    def move(self, from_slots: Ints, to_slots: Ints, lengths: Ints) -> None:
        """Copy the first `lengths` positions of slots `from_slots` to slots `to_slots`; the two may overlap."""
        self._written[to_slots] = np.maximum(self._written[to_slots], lengths)
        for slots in (self._keys, self._values):
            moved = [
                slots[:, slot, :, :n].clone() for slot, n in zip(from_slots.tolist(), lengths.tolist(), strict=True)
            ]
            for slot, part in zip(to_slots.tolist(), moved, strict=True):
                slots[:, slot, :, : part.shape[2]] = part

    def save(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of slots into the pool."""
        self._saved.update(copy.block for copy in copies)
        slots, places, blocks = self._indices(copies)
        self._pool[blocks] = self._blocks[:, :, slots, :, places]

    def load(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of the pool into slots."""
        slots, places, blocks = self._indices(copies)
        self._blocks[:, :, slots, :, places] = self._pool[blocks]

    def note(self, lengths: Ints) -> None:
        """Note that the first slots were written to up to `lengths` tokens."""
        self._written[: len(lengths)] = np.maximum(self._written[: len(lengths)], lengths)

    def trim(self, lengths: Ints, *, num_cached: int, cached: Callable[[], set[int]]) -> None:
        """Give memory back, once much of it is not needed. The first slots need `lengths` tokens, and the pool needs
        `num_cached` blocks, which `cached` returns."""
        needed = int(lengths.sum()) + num_cached * BLOCK_TOKENS
        unneeded = int(self._written.sum()) + len(self._saved) * BLOCK_TOKENS - needed
        least = max(needed * self._bytes_of_token // 8, TRIM_BYTES)
        if not self.is_lazy or unneeded * self._bytes_of_token < least:
            return
        if (needed + unneeded) * self._bytes_of_token <= KEPT_BYTES:
            return
        slots, pool = self._lazy
        lasting = np.zeros_like(self._written)
        lasting[: len(lengths)] = lengths
        first, end = (self._pages(each) * self._tokens_per_page for each in (lasting, self._written))
        for slot in np.flatnonzero(end > first).tolist():
            tail = slots.tensor[:, :, slot, :, first[slot] : end[slot]]
            for index in np.ndindex(*tail.shape[:3]):
                slots.give_back(tail[index])
        self._written = lasting
        for block in self._saved - cached():
            pool.give_back(pool.tensor[block])
            self._saved.remove(block)

    @property
    def num_reserved_bytes(self) -> int:
        """Memory that the slots take, without the pool."""
        if not self.is_lazy:
            return int(self._keys.nbytes + self._values.nbytes)
        return int(self._pages(self._written).sum()) * self._tokens_per_page * self._bytes_of_token

    @property
    def _bytes_of_token(self) -> int:
        num_bytes: int = 2 * self._shape[1] * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return num_bytes

    def _pages(self, num_tokens: Ints) -> Ints:
        """Return how many pages of a head hold this many tokens."""
        return -(-num_tokens // self._tokens_per_page)

    @property
    def _tokens_per_page(self) -> int:
        """Number of tokens of a head that a page holds whole, at least 1."""
        return max(mmap.PAGESIZE // (self.head_dim * self.dtype.itemsize), 1)

    def _indices(self, copies: Sequence[BlockCopy]) -> torch.Tensor:
        return torch.from_numpy(np.array(copies, dtype=np.int64).T.copy()).to(self.device)

    def erase(self, slots: Sequence[int]) -> None:
        """Zero slots."""
        for slot in slots:
            self._keys[:, slot, :, : self._written[slot]] = 0
            self._values[:, slot, :, : self._written[slot]] = 0


def head_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of key/value heads and the head size."""
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return num_heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def regroup(lengths: Ints, live: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return slot moves (source, target): `source[i]` is copied to `target[i]`, all at once. They close the holes of
    rows that are not `live` and put groups of longer rows first.

    A row that is already in the right group stays in place. So one ended row causes at most one move per group.
    """
    rows = np.flatnonzero(live)
    longest_first = rows[np.argsort(-lengths[rows], kind="stable")]
    group = np.empty(len(lengths), dtype=np.int64)
    group[longest_first] = np.arange(len(rows)) // GROUP_ROWS
    stays = (group[rows] == rows // GROUP_ROWS) & (rows < len(rows))
    movers = rows[~stays]
    free = np.ones(len(rows), dtype=np.bool_)
    free[rows[stays]] = False
    return movers[np.argsort(group[movers], kind="stable")], np.flatnonzero(free)
