"""The tokens of kept samples: the training samples of an episode as JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.config.trajectory_dump import KEPT_TOKENS
from penstock.samples import Credit, Sample, TrainedTurn
from penstock.types import NO_VERSION

MAX_GROUP_TOKENS = 1 << 17
"""Most tokens of a kept group: about two megabytes. Members that exceed it are kept without tokens."""
DECIMALS = 4
"""Decimals of log-probabilities."""


class KeptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """A training sample of an episode. Runs are [start, end) of equal values, so that they take little room."""

    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled tokens only, in order: nats."""
    sampled: list[tuple[int, int]]
    """Runs in which the loss mask is 1."""
    policy_versions: list[tuple[int, int, int]]
    """(policy_version, start, end) of each run of sampled tokens."""
    turns: list[TrainedTurn]
    conversation: int = 0
    credit: Credit | None = None
    truncated: bool = False
    temperature: float = 1.0


def kept(sample: Sample) -> KeptTokens:
    """Return a training sample in the form that is kept."""
    mask = sample.loss_mask != 0
    logprobs = np.nan_to_num(sample.logprobs[mask].astype(np.float64), posinf=0.0, neginf=-1e4)
    runs = _runs(np.where(mask, sample.versions, NO_VERSION - 1))
    return KeptTokens(
        token_ids=sample.token_ids.tolist(),
        logprobs=logprobs.round(DECIMALS).tolist(),
        sampled=[(start, end) for value, start, end in _runs(mask.astype(np.int8)) if value],
        policy_versions=[(version, start, end) for version, start, end in runs if version >= NO_VERSION],
        turns=list(sample.turns),
        conversation=sample.conversation,
        credit=sample.credit,
        truncated=sample.truncated,
        temperature=sample.temperature,
    )


def samples_of(row: Mapping[str, Any]) -> list[Sample]:
    """Return the training samples of a kept row; none if it has no tokens. Raises ValueError if they are damaged."""
    found = row.get(KEPT_TOKENS)
    if found is None:
        return []
    try:
        all_kept = msgspec.convert(found, list[KeptTokens], strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    return [_sample(row["group"], row["episode"], float(row["reward"]), each) for each in all_kept]


def _sample(group: int, episode: int, reward: float, found: KeptTokens) -> Sample:
    length = len(found.token_ids)
    mask, logprobs = np.zeros(length, np.uint8), np.zeros(length, np.float32)
    versions = np.full(length, NO_VERSION, np.int32)
    places = [(start, end) for start, end in found.sampled]
    places += [(start, end) for _, start, end in found.policy_versions]
    places += [(turn.start, turn.end) for turn in found.turns]
    if not all(0 <= start <= end <= length for start, end in places):
        raise ValueError(f"a run of tokens leaves the {length} of its sample")
    for start, end in found.sampled:
        mask[start:end] = 1
    if int(mask.sum()) != len(found.logprobs):
        raise ValueError(f"{len(found.logprobs)} log-probabilities of {int(mask.sum())} sampled tokens")
    logprobs[mask != 0] = found.logprobs
    for version, start, end in found.policy_versions:
        versions[start:end] = version
    return Sample(
        group=group,
        episode=episode,
        reward=reward,
        truncated=found.truncated,
        temperature=found.temperature,
        conversation=found.conversation,
        credit=found.credit,
        turns=found.turns,
        token_ids=np.asarray(found.token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
    )


def _runs(values: npt.NDArray[Any]) -> Sequence[tuple[int, int, int]]:
    """Return (value, start, end) of each run of equal values."""
    if not len(values):
        return []
    cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return [(int(values[start]), start, end) for start, end in pairwise(cuts)]
