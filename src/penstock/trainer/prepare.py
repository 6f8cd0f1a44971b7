"""Turn samples into a trainable batch: drop unusable samples, compute advantages, lay out columns.

`prepare` runs once over whole groups, before the batch is split over ranks: an advantage relative to a group's mean
reward needs all samples of its group (`advantages.py`). Those relative to a value function follow later, from `Critic`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from penstock.config.trainer_settings import AdvantagesConfig
from penstock.groups.batch import Batch
from penstock.routed_experts import Record
from penstock.samples import Sample
from penstock.trainer.advantages import advantages, token_rewards
from penstock.trainer.noise import first_half
from penstock.trainer.packing import EXPERTS
from penstock.version_history import Ints

PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "versions")
"""Columns of a sample with one value per token."""
NOT_RECORDED = np.zeros(0, dtype=np.uint8)
LARGEST_REWARD = 1e12
"""Largest absolute reward of an episode: the sum over a million turns of the largest reward that a turn may have.
Squares of such rewards are finite in float32."""


UNTRAINED = ("too_long", "unknown_token", "greedy", "empty", "no_prompt", "nonfinite_logprob", "unknown_version")
"""Reasons for which a sample cannot be trained, although its rewards are sound."""
GRPO = AdvantagesConfig()


def prepare(
    samples: Sequence[Sample],
    *,
    settings: AdvantagesConfig = GRPO,
    for_critic: bool = False,
    renumbered: Callable[[Ints], Ints] = lambda versions: versions,
    max_context: int | None = None,
    vocab_size: int | None = None,
) -> tuple[Batch, dict[str, int]]:
    """Return the batch for `Learner.accumulate`, and the number of dropped samples by reason.

    A dropped sample does not count in its group's mean either. Samples longer than `max_context` tokens are dropped,
    and so are samples with a token beyond `vocab_size`. `advantages` has one number for each sample, or one array with
    those of its tokens. `for_critic` adds the column `token_rewards`. The column `early` marks the samples of the first
    groups, about half of all samples: the smaller batch for the gradient noise scale. If experts are recorded, the
    column `experts` has the rows of a sample one after the other, or nothing for a sample without a record.
    `renumbered` returns new numbers for versions: the version being trained minus such a number is the staleness of the
    token (`VersionHistory.renumbered`).
    """
    reasons = [_unusable(sample, max_context, vocab_size) for sample in samples]
    kept = [sample for sample, reason in zip(samples, reasons, strict=True) if reason is None]
    groups = np.asarray([sample.group for sample in kept], dtype=np.int64)
    dropped = [sample for sample, reason in zip(samples, reasons, strict=True) if reason in UNTRAINED]
    found = advantages(kept, settings, dropped)
    columns, values = ({"advantages": found}, {}) if isinstance(found, np.ndarray) else ({}, {"advantages": found})
    batch = Batch(
        columns=columns
        | {
            "temperatures": np.asarray([sample.temperature for sample in kept], dtype=np.float32),
            "groups": groups,
            "early": np.arange(len(kept)) < first_half(groups),
        },
        values=values
        | ({"token_rewards": token_rewards(kept, dropped)} if for_critic else {})
        | ({EXPERTS: _flat_experts(kept)} if any(sample.experts is not None for sample in kept) else {})
        | {name: [getattr(sample, name) for sample in kept] for name in PER_TOKEN}
        | {"versions": [renumbered(sample.versions) for sample in kept]},
    )
    return batch, dict(Counter(reason for reason in reasons if reason is not None))


def _flat_experts(samples: Sequence[Sample]) -> list[Record]:
    """Return the rows of each sample's experts one after the other, all of one type: batches send those as they are."""
    found = [sample.experts for sample in samples]
    dtype = next(each.dtype for each in found if each is not None)
    return [NOT_RECORDED.astype(dtype) if each is None or each.dtype != dtype else each.reshape(-1) for each in found]


def _unusable(sample: Sample, max_context: int | None, vocab_size: int | None) -> str | None:
    """Return the reason why `sample` cannot be trained; None if it can."""
    rewards = [sample.reward, *(turn.reward for turn in sample.turns)]
    if sample.credit is not None:
        rewards.append(sample.credit.reward)
    if not all(map(math.isfinite, rewards)):
        return "nonfinite_reward"
    if max(map(abs, rewards)) > LARGEST_REWARD:
        return "huge_reward"
    length = len(sample.token_ids)
    if any(len(array) != length for array in (sample.loss_mask, sample.logprobs, sample.versions)):
        return "mismatched_lengths"
    if sample.experts is not None and len(sample.experts) != length:
        return "mismatched_lengths"
    if max_context is not None and length > max_context:
        return "too_long"
    if vocab_size is not None and length and not 0 <= sample.token_ids.min() <= sample.token_ids.max() < vocab_size:
        return "unknown_token"
    if not sample.temperature > 0.0:
        return "greedy"  # its log-probabilities are those of no distribution
    if not sample.loss_mask.any():
        return "empty"
    if sample.loss_mask[0]:
        return "no_prompt"  # no token precedes the first sampled token, so no logits predict it
    trained = sample.loss_mask != 0
    if not np.isfinite(sample.logprobs[trained]).all():
        return "nonfinite_logprob"
    if (sample.versions[trained] < 0).any():
        return "unknown_version"
    return None
