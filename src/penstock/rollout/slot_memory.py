"""Keys and values in slots: running sequences have a slot each, and cached prefixes are copied to and from a pool.

The slots and the pool share one number of blocks. Prefixes that no sample needs give way to running samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from penstock.rollout.admission import Admission
from penstock.rollout.prefix_cache import BLOCK_TOKENS, Node, PrefixCache, RecordOf
from penstock.rollout.slots import BlockCopy, Ints, SlotCache

TRIM_STEPS = 64
"""Steps after which memory may be given back again. Ended samples are often followed by others of the same length."""


class Kept(NamedTuple):
    """Tokens of a row that the prefix cache gets."""

    row: int
    token_ids: Sequence[int]
    record: RecordOf | None
    """Of the experts that computed them; None if the model has none."""


class SlotMemory:
    """Slots, pool and prefix cache. Row i lives in slot i."""

    block_tokens = BLOCK_TOKENS

    def __init__(
        self, model: PreTrainedModel, *, num_slots: int, max_context: int, num_tokens: int, num_cached: int | None
    ) -> None:
        """Allocate memory for `num_tokens` tokens of samples and prefixes together, with the model's shape, dtype and
        device. `num_cached`: maximum number of tokens of prefixes; None for all.

        On an accelerator every slot takes the memory of a whole context. Raises ValueError if they are too many."""
        self.num_blocks = num_pooled = -(-num_tokens // BLOCK_TOKENS)
        if model.device.type != "cpu":
            num_pooled -= num_slots * -(-max_context // BLOCK_TOKENS)
            if num_pooled < 0:
                raise ValueError(
                    f"{num_slots} slots of {max_context} tokens do not fit into the memory of {model.device}, which "
                    f"has room for {num_tokens} tokens: reduce rollout.slots or model.max_context"
                )
        self.prefixes = PrefixCache(num_pooled if num_cached is None else min(num_cached // BLOCK_TOKENS, num_pooled))
        self.cache = SlotCache(model, num_slots=num_slots, max_context=max_context, num_blocks=self.prefixes.num_blocks)
        self.device: torch.device = self.cache.device
        self._lengths: Ints = np.zeros(0, dtype=np.int64)
        """Number of tokens in the first slots, since the last step."""
        self._num_steps = 0
        """Number of steps since memory was given back."""

    def allocate(self) -> None:
        """Allocate the memory, filled with zeros."""
        self.cache.allocate()

    def free(self) -> None:
        """Free the memory, of which no row uses anything. It must not be read or written before `allocate`."""
        self.cache.free()

    def num_free(self, positions: Ints) -> int:
        """Return how many blocks are left when each row has room for the token at its position; negative if they are
        too few."""
        return self.num_blocks - int((positions // BLOCK_TOKENS).sum()) - len(positions)

    def needs(self, num_tokens: int, prefix: Sequence[Node]) -> tuple[int, int]:
        """Return how many blocks the first sample of a prompt needs, and each other one."""
        num_blocks = -(-num_tokens // BLOCK_TOKENS)
        return num_blocks, num_blocks

    def begin(self, positions: Ints, num_decode: int, admissions: Sequence[Admission]) -> None:
        """Make room for the tokens of a step. Rows from `num_decode` on are those of the admissions."""
        copies, slot = list[BlockCopy](), num_decode
        for admission in admissions:
            for _ in range(admission.num_slots):
                copies += (BlockCopy(slot, place, node.block) for place, node in enumerate(admission.prefix))
                slot += 1
        if copies:
            self.cache.load(copies)
        self.prefixes.restrict(self.num_free(positions))
        self._lengths = positions + 1
        if admissions and admissions[0].is_part:
            self._lengths = np.append(self._lengths, len(admissions[0].prompt_ids))
        self._num_steps += 1
        if self._num_steps >= TRIM_STEPS:
            self._num_steps = 0
            self.cache.note(self._lengths)
            self.cache.trim(self._lengths, num_cached=self.prefixes.num_cached, cached=self.prefixes.blocks)

    def share(self, num_decode: int, admissions: Sequence[Admission]) -> None:
        """Do nothing: keys and values of a prompt were written to the slots of all its samples."""

    @property
    def num_reserved_bytes(self) -> int:
        """Memory that the rows take."""
        self.cache.note(self._lengths)
        return self.cache.num_reserved_bytes

    def keep(self, kept: Iterable[Kept]) -> None:
        """Copy keys and values of rows into the prefix cache."""
        copies: dict[int, BlockCopy] = {}  # by block, because a block may be evicted and get other tokens in one step
        for row, token_ids, record in kept:
            for place, block in self.prefixes.add(token_ids, record):
                copies[block] = BlockCopy(row, place, block)
        if copies:
            self.cache.save([*copies.values()])

    def leave(self, rows: Iterable[int]) -> None:
        """Note what the rows have written: the next row in a slot overwrites it, or it is given back."""
        self.cache.note(self._lengths)

    def move(self, source: Ints, target: Ints, num_rows: int, length: Ints) -> None:
        """Copy the first `length` positions of rows, of which the first `num_rows` remain."""
        self.cache.note(self._lengths)
        if len(source):
            self.cache.move(source, target, length)

    def erase(self, rows: Sequence[int]) -> None:
        """Zero rows after non-finite values, so that the next sequences in their slots get no NaN."""
        self.cache.note(self._lengths)
        self.cache.erase(rows)
