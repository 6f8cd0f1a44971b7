"""Forwards of an engine on a CUDA device: one attention call per layer over rows of any length, recorded once.

Launching the hundreds of small kernels of a decode step takes several times as long as computing them. So a forward is
recorded as a CUDA graph the first time its shape comes, and replayed from then on. Shapes are padded to few: rows for
decoding alone, tokens where prompts join. What padding writes goes to a slot that nobody owns.

Attention reads keys and values where they lie, every row as far as it goes: to FlashAttention's kernel for sequences of
different lengths, the slots are one long sequence of keys with a start and a length for each row. A prompt is computed
in the slot of its first sample and copied to those of its siblings.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from penstock.rollout.admission import Admission
from penstock.rollout.attention import Packed
from penstock.rollout.rows import Rows
from penstock.rollout.slots import SlotCache

LARGEST_RECORDED = 4096
"""Tokens. What is larger computes for longer than it takes to launch."""
HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
FLASH_CAPABILITY = (8, 0)

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]


def records(cache: SlotCache) -> bool:
    """Whether forwards over these slots can be computed here: FlashAttention must know device, dtype and head size."""
    if cache.device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(cache.device) < FLASH_CAPABILITY:
        return False
    return cache.dtype in HALVES and cache.head_dim % 8 == 0 and cache.head_dim <= LARGEST_HEAD


class Shape(NamedTuple):
    """What a forward is padded to."""

    tokens: int
    sequences: int
    logits: int
    longest: int
    """New tokens of one sequence."""

    @property
    def sizes(self) -> list[int]:
        """Of the arrays in `Layout.padded`."""
        return [*[self.tokens] * 3, self.logits, *[self.sequences + 1] * 2, self.sequences]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A step of n rows as T packed tokens of B sequences: those that decode, one token each, then the prompts."""

    token_ids: Ints  # [T]
    positions: Ints  # [T]
    slots: Ints  # [T]
    last: Ints  # [n], where in the pack the logits of each row are
    query_starts: Ints  # [B + 1]
    first_slots: Ints  # [B], the sequence's own
    key_lengths: Ints  # [B]
    source: Ints  # slots of prompts whose siblings' slots
    target: Ints  # are these

    @classmethod
    def build(cls, rows: Rows, num_decode: int, admissions: list[Admission]) -> Layout:
        """Rows [0, num_decode) decode, `admissions` fill the rest."""
        decoding = rows.positions[:num_decode]
        lengths = np.asarray([1] * num_decode + [len(it.prompt_ids) for it in admissions], dtype=np.int64)
        samples = np.asarray([1] * num_decode + [len(it.sequences) for it in admissions], dtype=np.int64)
        first_slots, query_ends = np.cumsum(samples) - samples, np.cumsum(lengths)
        owners = np.repeat(first_slots, samples)
        siblings = np.flatnonzero(owners != np.arange(len(owners)))
        prompts = chain.from_iterable(admission.prompt_ids for admission in admissions)
        return cls(
            token_ids=np.concatenate([rows.tokens[:num_decode], np.fromiter(prompts, dtype=np.int64)]),
            positions=np.concatenate([decoding, *(np.arange(length) for length in lengths[num_decode:])]),
            slots=np.repeat(first_slots, lengths),
            last=np.repeat(query_ends - 1, samples),
            query_starts=np.concatenate([[0], query_ends]),
            first_slots=first_slots,
            key_lengths=np.concatenate([decoding + 1, lengths[num_decode:]]),
            source=owners[siblings],
            target=siblings,
        )

    @property
    def decodes_only(self) -> bool:
        return len(self.token_ids) == len(self.last) == len(self.first_slots)

    def padded(self, shape: Shape, *, slot_keys: int, spare_slot: int) -> Ints:
        """All arrays in one, each padded to its size; `slot_keys` lie between the beginnings of two slots."""
        arrays = (
            (self.token_ids, 0),
            (self.positions, 0),
            (self.slots, spare_slot),
            (self.last, 0),
            (self.query_starts, self.query_starts[-1]),
            (self.first_slots * slot_keys, 0),
            (self.key_lengths, 0),
        )
        parts = [
            np.pad(array, (0, size - len(array)), constant_values=filler)
            for (array, filler), size in zip(arrays, shape.sizes, strict=True)
        ]
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """What attention needs of a packed forward."""

    cache: SlotCache
    slots: torch.Tensor  # [T] and
    positions: torch.Tensor  # [T]: where keys and values go
    query_starts: torch.Tensor  # [B + 1], int32
    key_starts: torch.Tensor  # [B + 1], int32
    key_lengths: torch.Tensor  # [B], int32
    longest: int

    def attend(self, packed: Packed, layer: int, scaling: float) -> torch.Tensor:
        """[T, H, D]: every token over its sequence up to itself."""
        keys, values = self.cache.layer(layer)
        keys[self.slots, :, self.positions] = packed.key
        values[self.slots, :, self.positions] = packed.value
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(
            packed.query,
            _as_one_sequence(keys),
            _as_one_sequence(values),
            self.query_starts,
            self.key_starts,
            self.longest,
            keys.shape[2],
            0.0,
            True,
            False,
            scale=scaling,
            seqused_k=self.key_lengths,
        )[0]
        return out


def _as_one_sequence(slots: torch.Tensor) -> torch.Tensor:
    """[S, K, C, D] seen as [keys, K, D]: slot s begins at key s * K * C."""
    num_slots, num_heads, context, size = slots.shape
    num_keys = (num_slots * num_heads - (num_heads - 1)) * context
    return slots.as_strided((num_keys, num_heads, size), (size, context * size, 1))


class RecordedForwards:
    """Logits of a step's rows. What it returns is overwritten by the next call."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, *, num_rows: int) -> None:
        """`cache` has a slot more than there are rows."""
        self._model, self._cache, self._num_rows = model, cache, num_rows
        self._recordable = True
        self.forget()

    def forget(self) -> None:
        """Let go of all recordings, and of the memory that they work in: the slots are about to move."""
        self._recorded: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._out: torch.Tensor | None = None
        """What all recordings write their logits to, [n, vocab]."""

    def __call__(self, rows: Rows, num_decode: int, admissions: list[Admission]) -> torch.Tensor:
        """[n, vocab]."""
        layout = Layout.build(rows, num_decode, admissions)
        shape = self._shape(layout)
        slot_keys = self._cache.num_kv_heads * self._cache.max_context
        padded = torch.from_numpy(layout.padded(shape, slot_keys=slot_keys, spare_slot=self._num_rows))
        logits = self._logits(shape, padded)[: len(layout.last)]
        if len(layout.target):
            source, target = (torch.from_numpy(x).to(self._cache.device) for x in (layout.source, layout.target))
            self._cache.move(source, target, int(layout.key_lengths[num_decode:].max()))
        return logits

    def _shape(self, layout: Layout) -> Shape:
        num_tokens = len(layout.token_ids)
        if layout.decodes_only:
            num_rows = min(_rounded(num_tokens), self._num_rows)
            return Shape(num_rows, num_rows, num_rows, 1)
        if num_tokens <= LARGEST_RECORDED:
            num_tokens = max(_rounded(num_tokens), 64)
        return Shape(num_tokens, self._num_rows, self._num_rows, num_tokens)

    def _logits(self, shape: Shape, padded: torch.Tensor) -> torch.Tensor:
        if shape not in self._recorded:
            if not self._recordable or shape.tokens > LARGEST_RECORDED:
                return self._compute(shape, padded.to(self._cache.device))
            return self._record(shape, padded.to(self._cache.device))
        graph, inputs = self._recorded[shape]
        inputs.copy_(padded)
        graph.replay()
        assert self._out is not None
        return self._out

    def _record(self, shape: Shape, inputs: torch.Tensor) -> torch.Tensor:
        """The first forward of its shape is computed as it is: what a first call sets up is no part of a recording."""
        logits = self._compute(shape, inputs)
        if self._out is None:
            self._out = logits.new_empty(self._num_rows, logits.shape[-1])
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._out[: shape.logits] = self._compute(shape, inputs)
        except RuntimeError as error:
            logger.warning("this model's forward cannot be recorded, steps will take longer: %s", error)
            self._recordable = False
        else:
            self._recorded[shape] = graph, inputs
        return logits

    def _compute(self, shape: Shape, inputs: torch.Tensor) -> torch.Tensor:
        ids, positions, slots, last, *bounds = torch.split(inputs, shape.sizes)
        query_starts, key_starts, key_lengths = (bound.to(torch.int32) for bound in bounds)
        batch = RaggedBatch(
            cache=self._cache,
            slots=slots,
            positions=positions,
            query_starts=query_starts,
            key_starts=key_starts,
            key_lengths=key_lengths,
            longest=shape.longest,
        )
        logits: torch.Tensor = self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=last, slot_batch=batch
        ).logits[0]
        return logits


def _rounded(count: int) -> int:
    """Up, to one of few numbers: at most a third more."""
    step = max((1 << (count - 1).bit_length()) // 4, 1)
    return -(-count // step) * step
