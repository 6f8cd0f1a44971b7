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

SMALLEST_RECORDED, LARGEST_RECORDED = 64, 4096
"""Prompt tokens. What is larger computes for longer than it takes to launch."""
HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
FLASH_CAPABILITY = (8, 0)

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
NOTHING: Ints = np.zeros(0, dtype=np.int64)


def records(cache: SlotCache) -> bool:
    """Whether forwards over these slots can be computed here: FlashAttention must know device, dtype and head size."""
    if cache.device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(cache.device) < FLASH_CAPABILITY:
        return False
    return cache.dtype in HALVES and cache.head_dim % 8 == 0 and cache.head_dim <= LARGEST_HEAD


class Shape(NamedTuple):
    """What a forward is padded to."""

    decoding: int
    """Rows that decode."""
    tokens: int
    """Of prompts."""
    prompts: int
    logits: int

    @property
    def sizes(self) -> list[int]:
        """Of the arrays in `Layout.padded`."""
        packed = self.decoding + self.tokens
        bounds = [self.decoding + 1, self.decoding, self.prompts + 1, self.prompts + 1, self.prompts]
        return [packed, packed, packed, self.logits, *bounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A step of n rows as packed tokens: one for each of d rows that decode, then P of p prompts."""

    decoded: tuple[Ints, Ints]  # [d] token ids and positions; row i decodes in slot i
    token_ids: Ints  # [P]
    positions: Ints  # [P]
    lengths: Ints  # [p]
    first_slots: Ints  # [p], each prompt is computed in
    last: Ints  # [n - d], which of the P tokens has the logits of a prompt's sample
    source: Ints  # slots of prompts whose siblings' slots
    target: Ints  # are these

    @classmethod
    def build(cls, rows: Rows, num_decode: int, admissions: list[Admission]) -> Layout:
        """Rows [0, num_decode) decode, `admissions` fill the rest."""
        lengths = np.asarray([len(admission.prompt_ids) for admission in admissions], dtype=np.int64)
        samples = np.asarray([len(admission.sequences) for admission in admissions], dtype=np.int64)
        first_slots = num_decode + np.cumsum(samples) - samples
        owners = np.repeat(first_slots, samples)
        siblings = np.flatnonzero(owners != num_decode + np.arange(len(owners)))
        prompts = chain.from_iterable(admission.prompt_ids for admission in admissions)
        return cls(
            decoded=(rows.tokens[:num_decode], rows.positions[:num_decode]),
            token_ids=np.fromiter(prompts, dtype=np.int64),
            positions=np.concatenate([NOTHING, *(np.arange(length) for length in lengths)]),
            lengths=lengths,
            first_slots=first_slots,
            last=np.repeat(np.cumsum(lengths) - 1, samples),
            source=owners[siblings],
            target=num_decode + siblings,
        )

    def shape(self, num_rows: int) -> Shape:
        """One of few, for an engine of so many rows: where prompts join, it does not depend on who decodes."""
        num_decode = len(self.decoded[0])
        if not len(self.lengths):
            num_decode = min(_rounded(num_decode), num_rows)
            return Shape(num_decode, 0, 0, num_decode)
        num_tokens = len(self.token_ids)
        if num_tokens <= LARGEST_RECORDED:
            num_tokens = max(_rounded(num_tokens), SMALLEST_RECORDED)
        return Shape(num_rows if num_decode else 0, num_tokens, num_rows, num_rows)

    def padded(self, shape: Shape, *, slot_keys: int, spare_slot: int) -> Ints:
        """All arrays of a forward in one, each padded to its size; `slot_keys` lie between the beginnings of two
        slots."""
        num_decode, query_ends = len(self.decoded[0]), np.cumsum(self.lengths)
        slots = np.arange(num_decode)
        parts = (
            *(_padded(self.decoded[0], shape.decoding), _padded(self.token_ids, shape.tokens)),
            *(_padded(self.decoded[1], shape.decoding), _padded(self.positions, shape.tokens)),
            _padded(slots, shape.decoding, spare_slot),
            _padded(np.repeat(self.first_slots, self.lengths), shape.tokens, spare_slot),
            _padded(np.concatenate([slots, shape.decoding + self.last]), shape.logits),
            _padded(slots * slot_keys, shape.decoding + 1),
            _padded(self.decoded[1] + 1, shape.decoding),
            _padded(np.concatenate([[0], query_ends]), shape.prompts + 1, len(self.token_ids)),
            _padded(self.first_slots * slot_keys, shape.prompts + 1),
            _padded(self.lengths, shape.prompts),
        )
        return np.concatenate(parts)


def _padded(array: Ints, size: int, filler: int = 0) -> Ints:
    return np.concatenate([array, np.full(size - len(array), filler)])


class Reach(NamedTuple):
    """Sequences of packed queries, and where in their slots the keys are that they end with."""

    query_starts: torch.Tensor  # [B + 1], int32
    key_starts: torch.Tensor  # [B + 1], int32
    key_lengths: torch.Tensor  # [B], int32
    longest: int
    """Queries of one sequence, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """What attention needs of a packed forward."""

    cache: SlotCache
    slots: torch.Tensor  # [T] and
    positions: torch.Tensor  # [T]: where keys and values go
    reaches: list[tuple[int, Reach]]
    """In the order of the pack, each with the number of its tokens: the kernel is fastest where all have one."""

    def attend(self, packed: Packed, layer: int, scaling: float) -> torch.Tensor:
        keys, values = self.cache.layer(layer)
        keys[self.slots, :, self.positions] = packed.key
        values[self.slots, :, self.positions] = packed.value
        queries = torch.split(packed.query, [num_tokens for num_tokens, _ in self.reaches])
        return torch.cat(
            [_flash(part, keys, values, reach, scaling) for part, (_, reach) in zip(queries, self.reaches, strict=True)]
        )


def _flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reach: Reach, scaling: float) -> torch.Tensor:
    """[T, H, D]: every token over its sequence up to itself."""
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query,
        _as_one_sequence(keys),
        _as_one_sequence(values),
        reach.query_starts,
        reach.key_starts,
        reach.longest,
        keys.shape[2],
        0.0,
        True,
        False,
        scale=scaling,
        seqused_k=reach.key_lengths,
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
        self.forget()

    def forget(self) -> None:
        """Let go of all recordings, and of the memory that they work in: the slots are about to move."""
        self._recordable = True
        self._recorded: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._out: torch.Tensor | None = None
        """What all recordings write their logits to, [n, vocab]."""

    def __call__(self, rows: Rows, num_decode: int, admissions: list[Admission]) -> torch.Tensor:
        """[n, vocab]."""
        layout = Layout.build(rows, num_decode, admissions)
        shape = layout.shape(self._num_rows)
        slot_keys = self._cache.num_kv_heads * self._cache.max_context
        padded = torch.from_numpy(layout.padded(shape, slot_keys=slot_keys, spare_slot=self._num_rows))
        logits = self._logits(shape, padded)[: len(rows)]
        if len(layout.target):
            source, target = (torch.from_numpy(x).to(self._cache.device) for x in (layout.source, layout.target))
            self._cache.move(source, target, int(layout.lengths.max()))
        return logits

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
        key_starts, key_lengths, query_starts, prompt_starts, prompt_lengths = (
            bound.to(torch.int32) for bound in bounds
        )
        one_each = torch.arange(shape.decoding + 1, dtype=torch.int32, device=inputs.device)
        reaches = [
            (shape.decoding, Reach(one_each, key_starts, key_lengths, 1)),
            (shape.tokens, Reach(query_starts, prompt_starts, prompt_lengths, shape.tokens)),
        ]
        batch = RaggedBatch(
            cache=self._cache, slots=slots, positions=positions, reaches=[each for each in reaches if each[0]]
        )
        logits: torch.Tensor = self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=last, slot_batch=batch
        ).logits[0]
        return logits


def _rounded(count: int) -> int:
    """Up, to one of few numbers: by less than half."""
    step = max((1 << (count - 1).bit_length()) // 4, 1)
    return -(-count // step) * step
