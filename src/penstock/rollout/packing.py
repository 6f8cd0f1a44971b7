"""Lays one engine step out as a single packed forward: a token per decoding row, then the admitted prompts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
import numpy.typing as npt
import torch

from penstock.rollout.attention import MASKED, DecodeGroup, PromptGroup, SlotBatch
from penstock.rollout.rows import Rows, Sequence
from penstock.rollout.slots import GROUP_ROWS, SlotCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A prompt to compute and the samples that continue it."""

    prompt_ids: list[int]
    sequences: list[Sequence]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The arguments of one forward over T packed tokens and how its logits belong to the rows."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    logits_to_keep: torch.Tensor | int
    """Packed positions whose logits are needed; 0 is all of them."""
    rows_of_logits: torch.Tensor | None
    """For each row the index of its logits; None if they are in row order already."""
    batch: SlotBatch


def pack(
    cache: SlotCache, rows: Rows, num_decode: int, admissions: list[Admission], device: torch.device
) -> Packed:
    """Lay out rows [0, num_decode), which decode, and `admissions` (ordered by prompt length), which fill the rest."""
    lengths = [len(admission.prompt_ids) for admission in admissions]
    prompts = chain.from_iterable(admission.prompt_ids for admission in admissions)
    ids = np.concatenate([rows.tokens[:num_decode], np.fromiter(prompts, dtype=np.int64)])
    decode_positions = rows.positions[:num_decode]
    positions = np.concatenate([decode_positions, *(np.arange(length) for length in lengths)])
    batch = SlotBatch(
        cache=cache,
        num_decode=num_decode,
        positions=torch.from_numpy(decode_positions.copy()).to(device),
        groups=_decode_groups(decode_positions, device),
        prompts=_prompt_groups(admissions, num_decode, device),
    )
    last_tokens = num_decode + np.cumsum(lengths, dtype=np.int64) - 1
    samples = np.repeat(np.arange(len(admissions)), [len(admission.sequences) for admission in admissions])
    return Packed(
        input_ids=torch.from_numpy(ids).to(device).unsqueeze(0),
        position_ids=torch.from_numpy(positions).to(device).unsqueeze(0),
        logits_to_keep=_index(np.arange(num_decode), last_tokens, device) if admissions else 0,
        rows_of_logits=_index(np.arange(num_decode), num_decode + samples, device) if admissions else None,
        batch=batch,
    )


def _decode_groups(positions: npt.NDArray[np.int64], device: torch.device) -> list[DecodeGroup]:
    groups = []
    for start in range(0, len(positions), GROUP_ROWS):
        part = positions[start : start + GROUP_ROWS]
        shortest, length = int(part.min()) + 1, int(part.max()) + 1
        mask = None
        if shortest < length:
            unwritten = np.arange(length) > part[:, None]
            mask = torch.from_numpy(np.where(unwritten, np.float32(MASKED), np.float32(0))).to(device)[:, None, None]
        groups.append(DecodeGroup(start=start, end=start + len(part), length=length, mask=mask))
    return groups


def _prompt_groups(admissions: list[Admission], first_row: int, device: torch.device) -> list[PromptGroup]:
    groups, start = [], first_row
    for length, members in groupby(admissions, key=lambda admission: len(admission.prompt_ids)):
        samples = [len(admission.sequences) for admission in members]
        rows = torch.from_numpy(np.repeat(np.arange(len(samples)), samples)).to(device)
        groups.append(PromptGroup(start=start, count=len(samples), length=length, first_row=first_row, rows=rows))
        start += len(samples) * length
        first_row += sum(samples)
    return groups


def _index(first: npt.NDArray[np.int64], then: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([first, then])).to(device)
