"""Attention over KV slots, registered with Transformers under the name `penstock_slots`.

One forward carries a *packed* sequence [1, T]: first one token for each decoding row, then whole prompts. All but
attention is position-wise, so packing wastes nothing; attention runs per part:

* decoding rows read their slots in groups of similar length, query heads of one KV head folded into one matrix;
* prompts of equal length attend causally among themselves, and their keys and values are written into every slot
  that will sample from them.

Decoding uses two batched matrix products: on CPU `scaled_dot_product_attention` with one query per row took 1.3 to 2
times as long at these shapes, most of it per call and head.
Dimensions: T packed tokens, S slots, H query heads, K key/value heads, D head size, C context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from penstock.rollout.slots import LayerSlots, SlotCache

ATTENTION_NAME = "penstock_slots"
MASKED = -1e30


class Packed(NamedTuple):
    """The heads of all packed tokens."""

    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [T, K, D]
    value: torch.Tensor  # [T, K, D]


class Batch(Protocol):
    """The layout of one packed forward."""

    def attend(self, packed: Packed, layer: int, scaling: float) -> torch.Tensor:
        """Keep keys and values of all tokens in their slots, and return what they attended to, [T, H, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Rows [start, end), which attend to at most `length` positions."""

    start: int
    end: int
    length: int
    mask: torch.Tensor | None
    """[end - start, 1, 1, length], 0 or MASKED; None if every row uses the whole length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """`count` prompts of `length` tokens from packed position `start` on; `rows` samples from slot `first_row` on."""

    start: int
    count: int
    length: int
    first_row: int
    rows: torch.Tensor
    """Which of the prompts each slot continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBatch:
    """A layout for any device."""

    cache: SlotCache
    num_decode: int
    rows: torch.Tensor  # [num_decode] and
    positions: torch.Tensor  # [num_decode]: where the new keys and values go
    groups: list[DecodeGroup]
    prompts: list[PromptGroup]

    def attend(self, packed: Packed, layer: int, scaling: float) -> torch.Tensor:
        slots = self.cache.layer(layer)
        out = packed.query.new_empty(packed.query.shape)
        if self.num_decode:
            _decode(packed, slots, self, scaling, out)
        for prompts in self.prompts:
            _prefill(packed, slots, prompts, scaling, out)
        return out


def slot_attention(
    module: Any,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, K, T, D]
    value: torch.Tensor,  # [1, K, T, D]
    attention_mask: torch.Tensor | None,
    *,
    slot_batch: Batch | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface. Returns ([1, T, H, D], None). Without a `slot_batch` the tokens are the end of
    one plain sequence, whose keys and values [1, K, S, D] are all here."""
    if sliding_window is not None or softcap is not None or s_aux is not None:
        raise NotImplementedError("the slot engine serves plain full attention: no sliding window, softcap or sinks")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if slot_batch is None:
        grouped = query.shape[1] != key.shape[1]
        num_queries, num_keys = query.shape[2], key.shape[2]
        seen = None
        if num_keys > num_queries:
            every = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
            seen = every.tril(num_keys - num_queries)
        attended = F.scaled_dot_product_attention(
            query, key, value, seen, is_causal=seen is None, scale=scaling, enable_gqa=grouped
        )
        return attended.transpose(1, 2), None
    packed = Packed(*(x[0].transpose(0, 1) for x in (query, key, value)))
    return slot_batch.attend(packed, module.layer_idx, scaling).unsqueeze(0), None


def _decode(packed: Packed, slots: LayerSlots, batch: SlotBatch, scaling: float, out: torch.Tensor) -> None:
    num_rows, (num_kv, size) = batch.num_decode, packed.key.shape[1:]
    query, key, value = (x[:num_rows] for x in packed)
    slots.keys[batch.rows, :, batch.positions] = key
    slots.values[batch.rows, :, batch.positions] = value
    query = (query * scaling).reshape(num_rows * num_kv, -1, size)  # the query heads of one KV head together
    folded = out[:num_rows].view(query.shape)
    keys, values = slots.keys.flatten(0, 1), slots.values.flatten(0, 1)  # [S * K, C, D]
    for group in batch.groups:
        part = slice(group.start * num_kv, group.end * num_kv)
        scores = torch.bmm(query[part], keys[part, : group.length].transpose(1, 2))
        if group.mask is not None:
            scores.view(group.end - group.start, num_kv, -1, group.length).add_(group.mask)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
        torch.bmm(weights, values[part, : group.length], out=folded[part])


def _prefill(packed: Packed, slots: LayerSlots, prompts: PromptGroup, scaling: float, out: torch.Tensor) -> None:
    tokens = slice(prompts.start, prompts.start + prompts.count * prompts.length)
    query, key, value = (_per_prompt(x[tokens], prompts.count) for x in packed)
    grouped = query.shape[1] != key.shape[1]
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    _per_prompt(out[tokens], prompts.count).copy_(attended)
    rows = slice(prompts.first_row, prompts.first_row + len(prompts.rows))
    slots.keys[rows, :, : prompts.length] = key.index_select(0, prompts.rows)
    slots.values[rows, :, : prompts.length] = value.index_select(0, prompts.rows)


def _per_prompt(packed: torch.Tensor, count: int) -> torch.Tensor:
    """[count * length, heads, D] seen as [count, heads, length, D]."""
    return packed.view(count, -1, *packed.shape[1:]).transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, slot_attention)
