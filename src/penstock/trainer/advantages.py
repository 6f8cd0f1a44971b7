"""Advantages: against the siblings of a group, or against a value function."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6
"""Keeps the division finite where a group's rewards barely differ."""


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, *, normalize: bool
) -> npt.NDArray[np.float32]:  # [n]
    """A_i = r_i - mean(group), divided by the group's population standard deviation if `normalize`.

    GRPO (Shao et al., arXiv 2402.03300, section 4.1); without the division Dr. GRPO (arXiv 2503.20783).

    `rewards` and `groups` have shape [n]; samples with equal entries in `groups` are compared with each other. Equal
    rewards give exactly zero, also where their floating-point mean would not.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    if reward.size == 0:
        return np.zeros(0, dtype=np.float32)
    _, member_of, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    mean = np.bincount(member_of, weights=reward) / sizes
    centered = reward - mean[member_of]
    spread = _spread(reward, member_of, len(sizes))
    centered[spread[member_of] == 0] = 0.0
    if normalize:
        deviation = np.sqrt(np.bincount(member_of, weights=centered**2) / sizes)
        centered /= deviation[member_of] + EPSILON
    return centered.astype(np.float32)


def _spread(
    reward: npt.NDArray[np.float64], member_of: npt.NDArray[np.intp], num_groups: int
) -> npt.NDArray[np.float64]:
    """Largest minus smallest reward of each group, [num_groups]."""
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, member_of, reward)
    np.maximum.at(high, member_of, reward)
    spread: npt.NDArray[np.float64] = high - low
    return spread


def generalized_advantages(
    rewards: npt.ArrayLike,  # [n], of whole episodes
    values: npt.NDArray[np.float32],  # [S], before each sampled token
    sampled: npt.NDArray[np.bool_],  # [S]
    lengths: npt.ArrayLike,  # [n], entries of each sample, in order
    *,
    discount: float,
    trace: float,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """(A, R), both [S] and 0 where nothing was sampled: A_t = sum_l (discount trace)^l d_(t+l), R_t = A_t + V_t, with
    d_t = r_t + discount V_(t+1) - V_t over a sample's sampled tokens; the reward comes with the last of them.

    Schulman et al., arXiv 1506.02438, eq. 16; the end of an episode has no value.
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
