"""CUDA-graph forwards of an engine. One attention call per layer covers rows of any length.

Launching the hundreds of small kernels of a decode step takes several times as long as computing them. So the engine
records a forward as a CUDA graph when its shape first occurs, and replays the graph later. Padding keeps the number of
shapes small: it pads rows in decode-only steps, and tokens in steps with prompts. Padding writes to an unused block.

Attention reads keys and values in place, up to the length of each row. It calls FlashAttention's kernel for sequences
of different lengths, which finds the blocks of each row in its table. The tables are an input of a recording, since
rows and their blocks change. A prompt is computed with the table of its first sample. The table lists the reused
beginning of a prompt already, so the queries of the prompt are the last tokens of its sequence.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from penstock.rollout import shared_blocks
from penstock.rollout.admission import Admission
from penstock.rollout.shared_blocks import BlockMemory
from penstock.rollout.slot_attention import Packed
from penstock.rollout.slot_rows import Rows
from penstock.rollout.slots import Ints, LayerSlots, head_shape

SMALLEST_RECORDED, LARGEST_RECORDED = 64, 4096
"""Bounds on prompt tokens. A larger forward takes longer to compute than to launch, so it is not recorded."""
TRIAL_TOLERANCE = 0.02
"""Largest accepted error of attention in half precision, of values of size 1."""
logger = logging.getLogger(__name__)

NOTHING: Ints = np.zeros(0, dtype=np.int64)


class Shape(NamedTuple):
    """The padded sizes of a forward."""

    decoding: int
    """Number of decoding rows."""
    tokens: int
    """Number of prompt tokens."""
    prompts: int
    logits: int

    def sizes(self, longest_table: int) -> list[int]:
        """Return the sizes of the arrays in `Layout.padded`."""
        packed = self.decoding + self.tokens
        tables = (self.decoding + self.prompts) * longest_table
        return [packed, packed, packed, self.logits, self.decoding, self.prompts + 1, self.prompts, tables]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A step of n rows as packed tokens: one token for each of d decoding rows, then P tokens of p prompts. The reused
    tokens of the prompts are not among them."""

    decoded: tuple[Ints, Ints]  # [d] token ids and positions of rows 0..d-1
    token_ids: Ints  # [P]
    positions: Ints  # [P]
    num_computed: Ints  # [p], tokens of each prompt among the P
    lengths: Ints  # [p], tokens of each prompt with the reused ones
    first_rows: Ints  # [p], the row in which each prompt is computed
    last: Ints  # for each new sample or the part of a prompt, the one of the P tokens that has its logits

    @classmethod
    def build(cls, rows: Rows, num_decode: int, admissions: list[Admission]) -> Layout:
        """Return the layout of a step. Rows [0, num_decode) decode; `admissions` fill the other rows."""
        lengths = np.asarray([len(admission.prompt_ids) for admission in admissions], dtype=np.int64)
        starts = np.asarray([admission.start for admission in admissions], dtype=np.int64)
        samples = np.asarray([admission.num_slots for admission in admissions], dtype=np.int64)
        prompts = chain.from_iterable(islice(each.prompt_ids, each.start, None) for each in admissions)
        return cls(
            decoded=(rows.tokens[:num_decode], rows.positions[:num_decode]),
            token_ids=np.fromiter(prompts, dtype=np.int64),
            positions=np.concatenate([NOTHING, *map(np.arange, starts, lengths)]),
            num_computed=lengths - starts,
            lengths=lengths,
            first_rows=num_decode + np.cumsum(samples) - samples,
            last=np.repeat(np.cumsum(lengths - starts) - 1, samples),
        )

    @property
    def exact(self) -> Shape:
        """The shape without padding."""
        num_decode, num_prompts = len(self.decoded[0]), len(self.lengths)
        return Shape(num_decode, len(self.token_ids), num_prompts, num_decode + len(self.last))

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

    def padded(self, shape: Shape, *, tables: Ints, block_tokens: int) -> Ints:
        """Return all arrays of a forward concatenated, each padded to its size. `tables` has one for each row."""
        num_decode, query_ends = len(self.decoded[0]), np.cumsum(self.num_computed)
        rows, prompt_rows = np.arange(num_decode), np.repeat(self.first_rows, self.num_computed)
        longest = tables.shape[1]
        parts = (
            *(_padded(self.decoded[0], shape.decoding), _padded(self.token_ids, shape.tokens)),
            *(_padded(self.decoded[1], shape.decoding), _padded(self.positions, shape.tokens)),
            _padded(tables[rows, self.decoded[1] // block_tokens], shape.decoding),
            _padded(tables[prompt_rows, self.positions // block_tokens], shape.tokens),
            _padded(np.concatenate([rows, shape.decoding + self.last]), shape.logits),
            _padded(self.decoded[1] + 1, shape.decoding),
            _padded(np.concatenate([[0], query_ends]), shape.prompts + 1, len(self.token_ids)),
            _padded(self.lengths, shape.prompts),
            _padded(tables[rows].ravel(), shape.decoding * longest),
            _padded(tables[self.first_rows].ravel(), shape.prompts * longest),
        )
        return np.concatenate(parts)


def _padded(array: Ints, size: int, filler: int = 0) -> Ints:
    return np.concatenate([array, np.full(size - len(array), filler)])


class Reach(NamedTuple):
    """Sequences of packed queries, and the keys of each sequence. A sequence's queries are its last tokens."""

    query_starts: torch.Tensor  # [R + 1], int32
    key_lengths: torch.Tensor  # [R], int32
    tables: torch.Tensor  # [R, longest table], int32
    longest: int
    """Maximum number of queries per sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    """The layout that attention needs for a packed forward."""

    memory: BlockMemory
    blocks: torch.Tensor  # [T], block of each token's keys and values
    places: torch.Tensor  # [T], place in this block
    reaches: list[tuple[int, Reach]]
    """Parts of the pack in order, each with its number of tokens. Decoding rows are a part of their own, because the
    kernel is fastest if all sequences have one query."""

    def attend(self, packed: Packed, layer: int, scaling: float) -> torch.Tensor:
        keys, values = self.memory.layer(layer)
        keys[self.blocks, :, self.places] = packed.key
        values[self.blocks, :, self.places] = packed.value
        queries = torch.split(packed.query, [num_tokens for num_tokens, _ in self.reaches])
        parts = zip(queries, self.reaches, strict=True)
        return torch.cat([flash(query, LayerSlots(keys, values), reach, scaling) for query, (_, reach) in parts])


def flash(query: torch.Tensor, blocks: LayerSlots, reach: Reach, scaling: float) -> torch.Tensor:
    """Return [T, H, D]: each token attends to its sequence up to itself. `blocks` has [N, K, B, D]."""
    keys, values = (each.transpose(1, 2) for each in blocks)
    key_starts = torch.zeros_like(reach.query_starts)  # the tables say where keys are
    # Some builds of torch put parts of split sequences into the wrong rows (pytorch#194167), except where the heads of
    # one query are grouped.
    is_grouped = reach.longest == 1 and query.shape[1] > keys.shape[2]
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        query,
        keys,
        values,
        reach.query_starts,
        key_starts,
        reach.longest,
        reach.tables.shape[1] * keys.shape[1],
        0.0,
        True,
        False,
        scale=scaling,
        seqused_k=reach.key_lengths,
        block_table=reach.tables,
        num_splits=None if is_grouped else 1,
    )[0]
    return out


@torch.inference_mode()
def finds_blocks(model: PreTrainedModel) -> bool:
    """Try the kernel on the model's device, and return whether it finds keys and values in blocks, with one query for
    each sequence and with several. Otherwise the log says why."""
    reason = _fault(model, [1, 1]) or _fault(model, [1, 5])
    if reason:
        logger.warning(
            "FlashAttention does not read blocks here, so each slot takes a whole context and steps are not recorded "
            "as CUDA graphs: %s; try another release of torch",
            reason,
        )
    return not reason


def _fault(model: PreTrainedModel, num_queries: list[int]) -> str:
    """Return what is wrong with attention of two sequences with this many queries; empty if nothing is."""
    (num_heads, head_dim), size = head_shape(model), shared_blocks.FLASH_BLOCK_TOKENS
    lengths = [size + 3, size + 7]
    data = torch.randn(2, 4, num_heads, size, head_dim, device=model.device, dtype=model.dtype)
    blocks, num_query_heads = LayerSlots(*data), model.config.get_text_config().num_attention_heads
    query = torch.randn(sum(num_queries), num_query_heads, head_dim, device=model.device, dtype=model.dtype)
    tables = torch.tensor([[2, 1], [3, 2]], dtype=torch.int32, device=model.device)
    starts = torch.tensor([0, 1, sum(num_queries)], dtype=torch.int32, device=model.device)
    key_lengths = torch.tensor(lengths, dtype=torch.int32, device=model.device)
    expected = list[torch.Tensor]()
    for row, (length, queries) in enumerate(zip(lengths, torch.split(query, num_queries), strict=True)):
        keys, values = (each[tables[row].long()].transpose(0, 1).flatten(1, 2)[:, :length] for each in blocks)
        seen = torch.ones(len(queries), length, dtype=torch.bool, device=model.device).tril(length - len(queries))
        attended = F.scaled_dot_product_attention(queries.transpose(0, 1), keys, values, seen, enable_gqa=True)
        expected.append(attended.transpose(0, 1))
    reach = Reach(query_starts=starts, key_lengths=key_lengths, tables=tables, longest=max(num_queries))
    try:
        found = flash(query, blocks, reach, head_dim**-0.5)
    except (RuntimeError, TypeError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    largest = float((found - torch.cat(expected)).abs().max())
    return "" if largest < TRIAL_TOLERANCE else f"it computed values that are off by {largest:.3g}"


class CudaGraphs:
    """Computes the logits of a step's rows. The next call overwrites the returned tensor."""

    def __init__(self, model: PreTrainedModel, memory: BlockMemory, *, num_rows: int) -> None:
        self._model, self._memory, self._num_rows = model, memory, num_rows
        self.forget()

    def forget(self) -> None:
        """Drop all recordings and their working memory, because the blocks are about to be freed."""
        self._recordable = True
        self._recorded: dict[Shape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None
        self._out: torch.Tensor | None = None
        """The output of all recordings: logits [n, vocab]."""

    def __call__(
        self, rows: Rows, num_decode: int, admissions: list[Admission], *, is_recorded: bool = True
    ) -> torch.Tensor:
        """Return the logits [n, vocab], and one more row for the part of a prompt. Without `is_recorded`, neither
        record nor replay anything."""
        layout, memory = Layout.build(rows, num_decode, admissions), self._memory
        shape = layout.shape(self._num_rows) if is_recorded else layout.exact
        padded = torch.from_numpy(layout.padded(shape, tables=memory.tables, block_tokens=memory.block_tokens))
        return self._logits(shape, padded, is_recorded=is_recorded)[: num_decode + len(layout.last)]

    def _logits(self, shape: Shape, padded: torch.Tensor, *, is_recorded: bool) -> torch.Tensor:
        if shape not in self._recorded or not is_recorded:
            if not (is_recorded and self._recordable) or shape.tokens > LARGEST_RECORDED:
                return self._compute(shape, padded.to(self._memory.device))
            return self._record(shape, padded.to(self._memory.device))
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
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
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
        longest = self._memory.tables.shape[1]
        ids, positions, blocks, last, *further = torch.split(inputs, shape.sizes(longest))
        key_lengths, query_starts, prompt_lengths, tables = (each.to(torch.int32) for each in further)
        decode_tables, prompt_tables = torch.split(tables.view(-1, longest), [shape.decoding, shape.prompts])
        one_each = torch.arange(shape.decoding + 1, dtype=torch.int32, device=inputs.device)
        decoding = shape.decoding, Reach(one_each, key_lengths, decode_tables, 1)
        prompts = shape.tokens, Reach(query_starts, prompt_lengths, prompt_tables, shape.tokens)
        batch = RaggedBatch(
            memory=self._memory,
            blocks=blocks,
            places=positions % self._memory.block_tokens,
            reaches=[each for each in (decoding, prompts) if each[0]],
        )
        logits: torch.Tensor = self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=last, attend=batch.attend
        ).logits[0]
        return logits


def _rounded(count: int) -> int:
    """Round up to one of few numbers, by less than half of `count`."""
    step = max((1 << (count - 1).bit_length()) // 4, 1)
    return -(-count // step) * step
