"""From trajectories to a trainable batch: refuse what cannot be trained, compare each group, lay out columns.

Runs once over whole groups, before the batch is split over ranks: an advantage needs all members of its group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.groups.batch import Batch
from penstock.trainer.advantages import group_advantages
from penstock.trainer.noise import first_half
from penstock.types import Sample


def prepare(
    samples: Sequence[Sample], *, normalize: bool, max_context: int | None = None
) -> tuple[Batch, dict[str, int]]:
    """The batch for `Learner.accumulate`, and how many samples were left out by reason.

    A sample that is left out takes no part in its group's mean either. Longer ones than `max_context` tokens are.
    Samples of one episode (its turns) share its advantage. `early` are those of the first groups, about half of all:
    a smaller batch, of which the gradient noise is measured.
    """
    reasons = [_unusable(sample, max_context) for sample in samples]
    kept = [sample for sample, reason in zip(samples, reasons, strict=True) if reason is None]
    groups = np.asarray([sample.group for sample in kept], dtype=np.int64)
    batch = Batch(
        columns={
            "advantages": _advantages(kept, normalize=normalize),
            "rewards": np.asarray([sample.reward for sample in kept], dtype=np.float32),
            "groups": groups,
            "early": np.arange(len(kept)) < first_half(groups),
        },
        values={
            "token_ids": [sample.token_ids for sample in kept],
            "loss_mask": [sample.loss_mask for sample in kept],
            "logprobs": [sample.logprobs for sample in kept],
            "versions": [sample.versions for sample in kept],
        },
    )
    return batch, dict(Counter(reason for reason in reasons if reason is not None))


def _advantages(samples: Sequence[Sample], *, normalize: bool) -> npt.NDArray[np.float32]:  # [n]
    """Episodes are compared, however many samples each of them has become."""
    episodes: dict[tuple[int, int], int] = {}
    places = [episodes.setdefault((sample.group, sample.episode), len(episodes)) for sample in samples]
    rewards = np.zeros(len(episodes))
    rewards[places] = [sample.reward for sample in samples]
    return group_advantages(rewards, [group for group, _ in episodes], normalize=normalize)[places]


def _unusable(sample: Sample, max_context: int | None) -> str | None:
    """Why `sample` cannot be trained; None if it can."""
    if not math.isfinite(sample.reward):
        return "nonfinite_reward"
    length = len(sample.token_ids)
    if any(len(array) != length for array in (sample.loss_mask, sample.logprobs, sample.versions)):
        return "mismatched_lengths"
    if max_context is not None and length > max_context:
        return "too_long"
    if not sample.loss_mask.any():
        return "empty"
    if sample.loss_mask[0]:
        return "no_prompt"  # nothing precedes the first sampled token: no logits to train
    trained = sample.loss_mask != 0
    if not np.isfinite(sample.logprobs[trained]).all():
        return "nonfinite_logprob"
    if (sample.versions[trained] < 0).any():
        return "unknown_version"
    return None
