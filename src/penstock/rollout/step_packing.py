"""The layout of one engine step as a single packed forward: one token per decoding row, then the admitted prompts.
Prompts leave out the tokens that they reuse from the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby, islice

import numpy as np
import torch

from penstock.rollout.admission import Admission
from penstock.rollout.slot_attention import MASKED, DecodeGroup, PromptGroup, SlotBatch
from penstock.rollout.slot_rows import Rows
from penstock.rollout.slots import GROUP_ROWS, Ints, SlotCache

MERGE_PADDING = 1024
"""Number of padded positions (rows x length) that cost as much as one more attention call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """The arguments of one forward over T packed tokens, and the mapping from its logits to the rows."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    logits_to_keep: torch.Tensor | int
    """Packed positions that need logits; 0 means all positions."""
    rows_of_logits: torch.Tensor | None
    """For each row, the index of its logits; then that of a part's. None if the logits are already in this order."""
    batch: SlotBatch


def pack(cache: SlotCache, rows: Rows, num_decode: int, admissions: list[Admission]) -> PackedStep:
    """Pack a step. Rows [0, num_decode) decode; `admissions` (ordered by prompt length) fill the other rows."""
    device = cache.device
    prompts = chain.from_iterable(islice(admission.prompt_ids, admission.start, None) for admission in admissions)
    ids = np.concatenate([rows.tokens[:num_decode], np.fromiter(prompts, dtype=np.int64)])
    decode_positions = rows.positions[:num_decode]
    computed = (np.arange(admission.start, len(admission.prompt_ids)) for admission in admissions)
    positions = np.concatenate([decode_positions, *computed])
    batch = SlotBatch(
        cache=cache,
        num_decode=num_decode,
        rows=torch.arange(num_decode, device=device),
        positions=torch.from_numpy(decode_positions.copy()).to(device),
        groups=_decode_groups(decode_positions, device),
        prompts=_prompt_groups(admissions, num_decode, device),
    )
    lengths = [admission.num_computed for admission in admissions]
    last_tokens = num_decode + np.cumsum(lengths, dtype=np.int64) - 1
    samples = np.repeat(np.arange(len(admissions)), [admission.num_slots for admission in admissions])
    return PackedStep(
        input_ids=torch.from_numpy(ids).to(device).unsqueeze(0),
        position_ids=torch.from_numpy(positions).to(device).unsqueeze(0),
        logits_to_keep=_index(np.arange(num_decode), last_tokens, device) if admissions else 0,
        rows_of_logits=_index(np.arange(num_decode), num_decode + samples, device) if admissions else None,
        batch=batch,
    )


def _decode_groups(positions: Ints, device: torch.device) -> list[DecodeGroup]:
    """Group the decoding rows. Neighbouring blocks share a group if padding costs less than one more call."""
    starts = np.arange(0, len(positions), GROUP_ROWS)
    lengths = (np.maximum.reduceat(positions, starts) + 1).tolist() if len(starts) else []
    groups: list[DecodeGroup] = []
    first, longest = 0, 0
    for start, length in zip(starts.tolist(), lengths, strict=True):
        padding = (start - first) * max(length - longest, 0) + GROUP_ROWS * max(longest - length, 0)
        if padding > MERGE_PADDING:
            groups.append(_decode_group(positions, first, start, longest, device))
            first, longest = start, 0
        longest = max(longest, length)
    if longest:
        groups.append(_decode_group(positions, first, len(positions), longest, device))
    return groups


def _decode_group(positions: Ints, start: int, end: int, length: int, device: torch.device) -> DecodeGroup:
    ends = positions[start:end, None]
    mask = None
    if ends.min() < length - 1:
        hidden = np.where(np.arange(length) > ends, np.float32(MASKED), np.float32(0))
        mask = torch.from_numpy(hidden).to(device)[:, None, None]
    return DecodeGroup(start=start, end=end, length=length, mask=mask)


def _prompt_groups(admissions: list[Admission], first_row: int, device: torch.device) -> list[PromptGroup]:
    groups, start = [], first_row
    for (length, past), members in groupby(admissions, key=lambda each: (len(each.prompt_ids), each.start)):
        num_slots = [admission.num_slots for admission in members]
        owners = np.repeat(np.arange(len(num_slots)), num_slots)
        first_slots = first_row + np.cumsum(num_slots) - num_slots
        group = PromptGroup(
            start=start,
            count=len(num_slots),
            length=length,
            past=past,
            first_row=first_row,
            rows=torch.from_numpy(owners).to(device),
            first_slots=torch.from_numpy(first_slots).to(device) if past else None,
            seen=torch.ones(length - past, length, dtype=torch.bool, device=device).tril(past) if past else None,
        )
        groups.append(group)
        start += len(num_slots) * (length - past)
        first_row += sum(num_slots)
    return groups


def _index(first: Ints, then: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([first, then])).to(device)
