"""Turn samples into a trainable batch: drop unusable samples, compute advantages, lay out columns.

`prepare` runs once over whole groups, before the batch is split over ranks: an advantage relative to a group's mean
reward needs all samples of its group. Advantages relative to a value function follow later, from `Critic`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.groups.batch import Batch
from penstock.samples import Sample
from penstock.trainer.noise import first_half
from penstock.version_history import Ints

PER_TOKEN = ("token_ids", "loss_mask", "logprobs", "versions")
"""Columns of a sample with one value per token."""
LARGEST_REWARD = 1e12
"""Largest absolute reward of an episode: the sum over a million turns of the largest reward that a turn may have.
Squares of such rewards are finite in float32."""
EPSILON = 1e-6
"""Keeps the division finite where a group's rewards barely differ."""


def prepare(
    samples: Sequence[Sample],
    *,
    normalize: bool,
    renumbered: Callable[[Ints], Ints] = lambda versions: versions,
    max_context: int | None = None,
    vocab_size: int | None = None,
) -> tuple[Batch, dict[str, int]]:
    """Return the batch for `Learner.accumulate`, and the number of dropped samples by reason.

    A dropped sample does not count in its group's mean either. Samples longer than `max_context` tokens are dropped,
    and so are samples with a token beyond `vocab_size`. The samples of one episode (its turns) share one advantage. The
    column `early` marks the samples of the first groups, about half of all samples: the smaller batch for the gradient
    noise scale. `renumbered` returns new numbers for versions: the version being trained minus such a number is the
    staleness of the token (`VersionHistory.renumbered`).
    """
    reasons = [_unusable(sample, max_context, vocab_size) for sample in samples]
    kept = [sample for sample, reason in zip(samples, reasons, strict=True) if reason is None]
    groups = np.asarray([sample.group for sample in kept], dtype=np.int64)
    batch = Batch(
        columns={
            "advantages": _advantages(kept, normalize=normalize),
            "rewards": np.asarray([sample.reward for sample in kept], dtype=np.float32),
            "temperatures": np.asarray([sample.temperature for sample in kept], dtype=np.float32),
            "groups": groups,
            "early": np.arange(len(kept)) < first_half(groups),
        },
        values={name: [getattr(sample, name) for sample in kept] for name in PER_TOKEN}
        | {"versions": [renumbered(sample.versions) for sample in kept]},
    )
    return batch, dict(Counter(reason for reason in reasons if reason is not None))


def _advantages(samples: Sequence[Sample], *, normalize: bool) -> npt.NDArray[np.float32]:  # [n]
    """Return each sample's advantage. Each episode counts once in its group, however many samples it has."""
    episodes: dict[tuple[int, int], int] = {}
    places = [episodes.setdefault((sample.group, sample.episode), len(episodes)) for sample in samples]
    rewards = np.zeros(len(episodes))
    rewards[places] = [sample.reward for sample in samples]
    return group_advantages(rewards, [group for group, _ in episodes], normalize=normalize)[places]


def _unusable(sample: Sample, max_context: int | None, vocab_size: int | None) -> str | None:
    """Return the reason why `sample` cannot be trained; None if it can."""
    if not math.isfinite(sample.reward):
        return "nonfinite_reward"
    if abs(sample.reward) > LARGEST_REWARD:
        return "huge_reward"
    length = len(sample.token_ids)
    if any(len(array) != length for array in (sample.loss_mask, sample.logprobs, sample.versions)):
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


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, *, normalize: bool
) -> npt.NDArray[np.float32]:  # [n]
    """Return A_i = r_i - mean(group), divided by the group's population standard deviation if `normalize`.

    GRPO (Shao et al., arXiv 2402.03300, section 4.1); without the division Dr. GRPO (arXiv 2503.20783).

    `rewards` and `groups` have shape [n]. Equal entries in `groups` mark the samples of one group. A group with equal
    rewards gets exactly zero, even if rounding of the mean would give another value.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    _, first, group, sizes = np.unique(np.asarray(groups), return_index=True, return_inverse=True, return_counts=True)
    centered = reward - (np.bincount(group, weights=reward) / sizes)[group]
    num_different = np.bincount(group, weights=reward != reward[first][group])
    centered[num_different[group] == 0] = 0.0
    if normalize:
        deviation = np.sqrt(np.bincount(group, weights=centered**2) / sizes)
        centered /= deviation[group] + EPSILON
    return centered.astype(np.float32)


def generalized_advantages(
    rewards: npt.ArrayLike,  # [n], of whole episodes
    values: npt.NDArray[np.float32],  # [S], before each sampled token
    sampled: npt.NDArray[np.bool_],  # [S]
    lengths: npt.ArrayLike,  # [n], entries of each sample, in order
    *,
    discount: float,
    trace: float,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return advantages and returns (A, R), both [S], and 0 at tokens that were not sampled.

    A_t = sum_l (discount trace)^l d_(t+l), R_t = A_t + V_t, with d_t = r_t + discount V_(t+1) - V_t. The index t runs
    over a sample's sampled tokens; the last of them receives the reward. V is 0 after the last token.

    Schulman et al., arXiv 1506.02438, eq. 16.
    """
    advantages = np.zeros_like(values)
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    for reward, end, length in zip(np.asarray(rewards, dtype=np.float64), ends, np.asarray(lengths), strict=True):
        following = later = 0.0
        for place in np.flatnonzero(sampled[end - length : end])[::-1] + (end - length):
            value = float(values[place])
            later = float(reward) + discount * following - value + discount * trace * later
            advantages[place], following, reward = later, value, 0.0
    return advantages, np.where(sampled, advantages + values, 0.0).astype(np.float32)
