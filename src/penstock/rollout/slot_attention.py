"""Attention over KV slots, registered with Transformers under the name `penstock_slots`.

One forward computes a *packed* sequence [1, T]: first one token for each decoding row, then prompts. All operations
except attention are position-wise, so packing wastes nothing. Attention runs separately per part:

* Decoding rows read their slots in groups of similar length. The query heads of one KV head form one matrix.
* Each prompt attends causally to itself; prompts of equal length share one call. Their keys and values are written into
  every slot that will sample from them. The slots of a prompt with a reused beginning hold this beginning already.

Decoding uses two batched matrix products. On CPU, `scaled_dot_product_attention` with one query per row took 1.3 to 2
times as long at these shapes. Most of that time was overhead per call and head.

Dimensions: T packed tokens, S slots, H query heads, K key/value heads, D head size, C context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

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


Attend = Callable[[Packed, int, float], torch.Tensor]
"""Writes keys and values of all tokens into their slots. Takes packed tokens, layer and scaling, and returns the
attention output [T, H, D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """Decoding rows [start, end) that share one attention call over at most `length` positions."""

    start: int
    end: int
    length: int
    mask: torch.Tensor | None
    """[end - start, 1, 1, length], 0 or MASKED; None if every row uses the whole length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """`count` prompts of `length` tokens, packed from position `start` on, without the first `past` tokens of each.
    Their samples start at slot `first_row`."""

    start: int
    count: int
    length: int
    past: int
    first_row: int
    rows: torch.Tensor
    """For each of these slots, the index of the prompt that its sample continues."""
    first_slots: torch.Tensor | None
    """[count], a slot of each prompt; None without a past."""
    seen: torch.Tensor | None
    """[length - past, length], the positions that each token attends to; None without a past."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotBatch:
    """The layout of a packed forward, for any device."""

    cache: SlotCache
    num_decode: int
    rows: torch.Tensor  # [num_decode], slots of the new keys and values
    positions: torch.Tensor  # [num_decode], their positions in these slots
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
    attend: Attend | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention through Transformers' attention interface. Return ([1, T, H, D], None).

    Without `attend`, the tokens are the end of one plain sequence. Then `key` and `value` [1, K, S, D] cover this
    whole sequence. Raises NotImplementedError for a sliding window, softcap or sinks."""
    if sliding_window is not None or softcap is not None or s_aux is not None:
        raise NotImplementedError("the slot engine serves plain full attention: no sliding window, softcap or sinks")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attend is None:
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
    return attend(packed, module.layer_idx, scaling).unsqueeze(0), None


def _decode(packed: Packed, slots: LayerSlots, batch: SlotBatch, scaling: float, out: torch.Tensor) -> None:
    num_rows, (num_kv, size) = batch.num_decode, packed.key.shape[1:]
    query, key, value = (x[:num_rows] for x in packed)
    slots.keys[batch.rows, :, batch.positions] = key
    slots.values[batch.rows, :, batch.positions] = value
    query = (query * scaling).reshape(num_rows * num_kv, -1, size)  # groups the query heads of one KV head
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
    tokens = slice(prompts.start, prompts.start + prompts.count * (prompts.length - prompts.past))
    query, key, value = (_per_prompt(x[tokens], prompts.count) for x in packed)
    rows, computed = (
        slice(prompts.first_row, prompts.first_row + len(prompts.rows)),
        slice(prompts.past, prompts.length),
    )
    slots.keys[rows, :, computed] = key.index_select(0, prompts.rows)
    slots.values[rows, :, computed] = value.index_select(0, prompts.rows)
    seen, grouped = prompts.seen, query.shape[1] // key.shape[1]
    if prompts.first_slots is not None:
        key, value = (x[prompts.first_slots, :, : prompts.length] for x in slots)
        if key.is_cuda:  # no fast kernel there takes a mask and groups of heads
            key, value = (x.repeat_interleave(grouped, dim=1) for x in (key, value))
    attended = F.scaled_dot_product_attention(
        query, key, value, seen, is_causal=seen is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    _per_prompt(out[tokens], prompts.count).copy_(attended)


def _per_prompt(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return a view of [count * length, heads, D] as [count, heads, length, D]."""
    return packed.view(count, -1, *packed.shape[1:]).transpose(1, 2)


AttentionInterface.register(ATTENTION_NAME, slot_attention)
