"""CUDA-graph forwards of an engine. One attention call per layer covers rows of any length.

Launching the hundreds of small kernels of a decode step takes several times as long as computing them. So the engine
records a forward as a CUDA graph when its shape first occurs, and replays the graph later. Padding keeps the number of
shapes small: it pads rows in decode-only steps, and tokens in steps with prompts. Padding writes to an unused slot.

Attention reads keys and values in place, up to the length of each row. It calls FlashAttention's kernel for sequences
of different lengths. This kernel sees the slots as one long sequence of keys, with a start and a length per row. A
prompt is computed in the slot of its first sample and copied to the slots of its other samples (siblings). The slot
holds the reused beginning of a prompt already, so the queries of the prompt are the last tokens of its sequence.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from penstock.rollout.admission import Admission
from penstock.rollout.slot_attention import Packed
from penstock.rollout.slot_rows import Rows
from penstock.rollout.slots import Ints, SlotCache

SMALLEST_RECORDED, LARGEST_RECORDED = 64, 4096
"""Bounds on prompt tokens. A larger forward takes longer to compute than to launch, so it is not recorded."""
HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
FLASH_CAPABILITY = (8, 0)

logger = logging.getLogger(__name__)

NOTHING: Ints = np.zeros(0, dtype=np.int64)


def records(cache: SlotCache) -> bool:
    """Return whether `CudaGraphs` supports these slots: FlashAttention must support the device, dtype and head size."""
    if cache.device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(cache.device) < FLASH_CAPABILITY:
        return False
    return cache.dtype in HALVES and cache.head_dim % 8 == 0 and cache.head_dim <= LARGEST_HEAD


class Shape(NamedTuple):
    """The padded sizes of a forward."""

    decoding: int
    """Number of decoding rows."""
    tokens: int
    """Number of prompt tokens."""
    prompts: int
    logits: int

    @property
    def sizes(self) -> list[int]:
        """Return the sizes of the arrays in `Layout.padded`."""
        packed = self.decoding + self.tokens
        bounds = [self.decoding + 1, self.decoding, self.prompts + 1, self.prompts + 1, self.prompts]
        return [packed, packed, packed, self.logits, *bounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A step of n rows as packed tokens: one token for each of d decoding rows, then P tokens of p prompts. The reused
    tokens of the prompts are not among them."""

    decoded: tuple[Ints, Ints]  # [d] token ids and positions; row i decodes in slot i
    token_ids: Ints  # [P]
    positions: Ints  # [P]
    num_computed: Ints  # [p], tokens of each prompt among the P
    lengths: Ints  # [p], tokens of each prompt with the reused ones
    first_slots: Ints  # [p], the slot in which each prompt is computed
    last: Ints  # for each new sample or the part of a prompt, the one of the P tokens that has its logits
    source: Ints  # slots of computed prompts, one entry per sibling sample
    target: Ints  # slots of these siblings, which `source` is copied to

    @classmethod
    def build(cls, rows: Rows, num_decode: int, admissions: list[Admission]) -> Layout:
        """Return the layout of a step. Rows [0, num_decode) decode; `admissions` fill the other rows."""
        lengths = np.asarray([len(admission.prompt_ids) for admission in admissions], dtype=np.int64)
        starts = np.asarray([admission.start for admission in admissions], dtype=np.int64)
        samples = np.asarray([len(admission.sequences) for admission in admissions], dtype=np.int64)
        first_slots = num_decode + np.cumsum(samples) - samples
        owners = np.repeat(first_slots, samples)
        siblings = np.flatnonzero(owners != num_decode + np.arange(len(owners)))
        prompts = chain.from_iterable(islice(each.prompt_ids, each.start, None) for each in admissions)
        return cls(
            decoded=(rows.tokens[:num_decode], rows.positions[:num_decode]),
            token_ids=np.fromiter(prompts, dtype=np.int64),
            positions=np.concatenate([NOTHING, *map(np.arange, starts, lengths)]),
            num_computed=lengths - starts,
            lengths=lengths,
            first_slots=first_slots,
            last=np.repeat(np.cumsum(lengths - starts) - 1, np.maximum(samples, 1)),
            source=owners[siblings],
            target=num_decode + siblings,
        )

    def shape(self, num_rows: int) -> Shape:
        """Return the padded shape for an engine with `num_rows` rows.

        There are few shapes. With prompts, the shape depends on whether any row decodes, but not on how many do."""
        num_decode = len(self.decoded[0])
        if not len(self.lengths):
            num_decode = min(_rounded(num_decode), num_rows)
            return Shape(num_decode, 0, 0, num_decode)
        num_tokens = len(self.token_ids)
        if num_tokens <= LARGEST_RECORDED:
            num_tokens = max(_rounded(num_tokens), SMALLEST_RECORDED)
        return Shape(num_rows if num_decode else 0, num_tokens, num_rows, num_rows)

    def padded(self, shape: Shape, *, slot_keys: int, spare_slot: int) -> Ints:
        """Return all arrays of a forward concatenated, each padded to its size. `slot_keys` is the number of keys from
        the start of one slot to the next."""
        num_decode, query_ends = len(self.decoded[0]), np.cumsum(self.num_computed)
        slots = np.arange(num_decode)
        parts = (
            *(_padded(self.decoded[0], shape.decoding), _padded(self.token_ids, shape.tokens)),
            *(_padded(self.decoded[1], shape.decoding), _padded(self.positions, shape.tokens)),
            _padded(slots, shape.decoding, spare_slot),
            _padded(np.repeat(self.first_slots, self.num_computed), shape.tokens, spare_slot),
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
    """Sequences of packed queries, and the range of keys of each sequence. A sequence's queries are its last tokens."""

    query_starts: torch.Tensor  # [B + 1], int32
    key_starts: torch.Tensor  # [B + 1], int32
    key_lengths: torch.Tensor  # [B], int32
    longest: int
    """Maximum number of queries per sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """The layout that attention needs for a packed forward."""

    cache: SlotCache
    slots: torch.Tensor  # [T], slot of each token's keys and values
    positions: torch.Tensor  # [T], position in this slot
    reaches: list[tuple[int, Reach]]
    """Parts of the pack in order, each with its number of tokens. Decoding rows are a part of their own, because the
    kernel is fastest if all sequences have one query."""

    def attend(self, packed: Packed, layer: int, scaling: float) -> torch.Tensor:
        keys, values = self.cache.layer(layer)
        keys[self.slots, :, self.positions] = packed.key
        values[self.slots, :, self.positions] = packed.value
        queries = torch.split(packed.query, [num_tokens for num_tokens, _ in self.reaches])
        parts = zip(queries, self.reaches, strict=True)
        return torch.cat([_flash(query, keys, values, reach, scaling) for query, (_, reach) in parts])


def _flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reach: Reach, scaling: float) -> torch.Tensor:
    """Return [T, H, D]: each token attends to its sequence up to itself."""
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
    """Return a view of [S, K, C, D] as [keys, K, D]. Slot s begins at key s * K * C."""
    num_slots, num_heads, context, size = slots.shape
    num_keys = (num_slots * num_heads - (num_heads - 1)) * context
    return slots.as_strided((num_keys, num_heads, size), (size, context * size, 1))


class CudaGraphs:
    """Computes the logits of a step's rows. The next call overwrites the returned tensor."""

    def __init__(self, model: PreTrainedModel, cache: SlotCache, *, num_rows: int) -> None:
        """`cache` has one slot more than `num_rows`. Padding writes to this slot."""
        self._model, self._cache, self._num_rows = model, cache, num_rows
        self.forget()

    def forget(self) -> None:
        """Drop all recordings and their working memory, because the slots are about to be freed."""
        self._recordable = True
        self._recorded: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._out: torch.Tensor | None = None
        """The output of all recordings: logits [n, vocab]."""

    def __call__(self, rows: Rows, num_decode: int, admissions: list[Admission]) -> torch.Tensor:
        """Return the logits [n, vocab], and one more row for the part of a prompt."""
        layout = Layout.build(rows, num_decode, admissions)
        shape = layout.shape(self._num_rows)
        slot_keys = self._cache.num_kv_heads * self._cache.max_context
        padded = torch.from_numpy(layout.padded(shape, slot_keys=slot_keys, spare_slot=self._num_rows))
        logits = self._logits(shape, padded)[: num_decode + len(layout.last)]
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
        """Compute the first forward of a shape without recording, then record the shape. The first call does one-time
        setup that a recording must not contain."""
        logits = self._compute(shape, inputs)
        if self._out is None:
            self._out = logits.new_empty(self._num_rows, logits.shape[-1])
        graph = torch.cuda.CUDAGraph()
        try:
            # `thread_local`, because other threads may use the device during the recording.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._out[: shape.logits] = self._compute(shape, inputs)
        except RuntimeError as error:
            logger.warning("cannot record the forward of this model as a CUDA graph, so steps take longer: %s", error)
            self._recordable = False
        else:
            self._recorded[shape] = graph, inputs
        return logits

    def _compute(self, shape: Shape, inputs: torch.Tensor) -> torch.Tensor:
        ids, positions, slots, last, *bounds = torch.split(inputs, shape.sizes)
        key_starts, key_lengths, query_starts, prompt_starts, prompt_lengths = (each.to(torch.int32) for each in bounds)
        one_each = torch.arange(shape.decoding + 1, dtype=torch.int32, device=inputs.device)
        decoding = shape.decoding, Reach(one_each, key_starts, key_lengths, 1)
        prompts = shape.tokens, Reach(query_starts, prompt_starts, prompt_lengths, shape.tokens)
        reaches = [each for each in (decoding, prompts) if each[0]]
        batch = RaggedBatch(cache=self._cache, slots=slots, positions=positions, reaches=reaches)
        logits: torch.Tensor = self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=last, attend=batch.attend
        ).logits[0]
        return logits


def _rounded(count: int) -> int:
    """Round up to one of few numbers, by less than half of `count`."""
    step = max((1 << (count - 1).bit_length()) // 4, 1)
    return -(-count // step) * step
