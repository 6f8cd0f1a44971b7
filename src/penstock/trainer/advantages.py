"""Advantages: how much better than others of its group an episode, a conversation or a turn went.

A *credited* unit is an episode, or a conversation of an agent that has its own reward (`Credit`). In each group the
units of one role are compared. The reward of a unit is the sum of its turns' rewards r_t, with t in the order in which
the turns were played. The return of a turn is R_t = sum_(k >= t) discount^(k - t) r_k.

* `episode`: all tokens of a unit have A = r - mean(r). GRPO (Shao et al., arXiv 2402.03300, section 4.1).
* `turn`: the tokens of turn t have A_t = R_t - mean(R_t), over the units that have a turn t.
* `gigpo`: A + weight (R_t - mean(R)), the mean over all turns of the group in the same state. GiGPO (Feng et al., arXiv
  2505.10978). A state that occurs once adds nothing.

With `normalize`, each difference is divided by the standard deviation of what is compared, of the population or of the
sample; without it the first form is that of Dr. GRPO (arXiv 2503.20783).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.config.trainer_settings import AdvantagesConfig
from penstock.samples import Sample, TrainedTurn

Floats = npt.NDArray[np.float32]
Unit = tuple[int, int, int]
"""Group, episode and, if it has its own reward, the number of the conversation."""

EPSILON = 1e-6
"""Keeps the division finite where rewards barely differ."""


def advantages(
    samples: Sequence[Sample], settings: AdvantagesConfig, dropped: Sequence[Sample] = ()
) -> Floats | list[Floats]:
    """Return the advantage of each sample, [n], or of each token: n arrays, 0 outside the actions of trained turns.
    `dropped`: samples that are not trained, and not compared. Their turns have earned rewards all the same."""
    of_units = _advantages_of_units(samples, settings)
    if not settings.are_of_turns:
        return of_units
    per_token = [np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples]
    of_turns = _advantages_of_turns(samples, settings, dropped)
    for sample, values, of_unit in zip(samples, per_token, of_units, strict=True):
        for turn in sample.turns:
            own = of_turns[_unit(sample), turn.turn]
            values[turn.start : turn.end] = own if settings.name == "turn" else of_unit + settings.turn_weight * own
    return per_token


def token_rewards(samples: Sequence[Sample], dropped: Sequence[Sample] = ()) -> list[Floats]:
    """Return what each sample earns at its tokens, n arrays, for a critic.

    The reward of a turn counts at the last sampled token up to the end of its action. Rewards of turns in other samples
    of the unit count at the latest turn of this sample that was played before; those before its first turn do not
    count.
    """
    turns, found = _turns_of_units([*samples, *dropped]), []
    for sample in samples:
        values, sampled = np.zeros(len(sample.token_ids), dtype=np.float64), np.flatnonzero(sample.loss_mask)
        numbers, of_unit = [turn.turn for turn in sample.turns], turns[_unit(sample)]
        for turn in of_unit:
            latest = bisect_right(numbers, turn.turn) - 1
            place = int(np.searchsorted(sampled, sample.turns[latest].end)) - 1 if latest >= 0 else -1
            if place >= 0:
                values[sampled[place]] += turn.reward
        values[sampled[-1]] += _reward(sample) - sum(turn.reward for turn in of_unit)
        found.append(values.astype(np.float32))
    return found


def _unit(sample: Sample) -> Unit:
    return sample.group, sample.episode, 0 if sample.credit is None else sample.conversation


def _reward(sample: Sample) -> float:
    return sample.reward if sample.credit is None else sample.credit.reward


def _role(sample: Sample) -> str:
    return "" if sample.credit is None else sample.credit.role


def _advantages_of_units(samples: Sequence[Sample], settings: AdvantagesConfig) -> Floats:
    """Return each sample's advantage, [n]. Each unit counts once, however many samples it has."""
    units: dict[Unit, int] = {}
    places = [units.setdefault(_unit(sample), len(units)) for sample in samples]
    rewards, compared = np.zeros(len(units)), [("", 0)] * len(units)
    for sample, place in zip(samples, places, strict=True):
        rewards[place], compared[place] = _reward(sample), (_role(sample), sample.group)
    return group_advantages(rewards, _numbered(compared), settings)[places]


def _advantages_of_turns(
    samples: Sequence[Sample], settings: AdvantagesConfig, dropped: Sequence[Sample]
) -> dict[tuple[Unit, int], float]:
    """Return the advantage of each turn of `samples` by its return alone."""
    sample_of = {_unit(sample): sample for sample in samples}
    kept = {(_unit(sample), turn.turn) for sample in samples for turn in sample.turns}
    keys: list[tuple[Unit, int]] = []
    returns: list[float] = []
    compared: list[Hashable] = []
    for unit, turns in _turns_of_units([*samples, *dropped]).items():
        if (one := sample_of.get(unit)) is None:
            continue
        later = _reward(one) - sum(turn.reward for turn in turns)  # 0 but for rounding
        for place, turn in reversed(list(enumerate(turns))):
            later = turn.reward + (settings.discount * later if place < len(turns) - 1 else later)
            if (unit, turn.turn) in kept:
                keys.append((unit, turn.turn))
                returns.append(later)
                compared.append((one.group, _role(one), place if settings.name == "turn" else turn.state))
    found = group_advantages(returns, _numbered(compared), settings)
    return dict(zip(keys, found.tolist(), strict=True))


def _turns_of_units(samples: Sequence[Sample]) -> dict[Unit, list[TrainedTurn]]:
    """Return all trained turns of each unit, in the order in which they were played."""
    found: dict[Unit, list[TrainedTurn]] = defaultdict(list)
    for sample in samples:
        found[_unit(sample)] += sample.turns
    return {unit: sorted(turns) for unit, turns in found.items()}


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def group_advantages(
    rewards: npt.ArrayLike, groups: npt.ArrayLike, settings: AdvantagesConfig
) -> npt.NDArray[np.float32]:  # [n]
    """Return A_i = r_i - mean(group), divided by the group's standard deviation if `settings.normalize`.

    `rewards` and `groups` have shape [n]. Equal entries in `groups` mark the samples of one group. A group with equal
    rewards gets exactly zero, even if rounding of the mean would give another value.
    """
    reward = np.asarray(rewards, dtype=np.float64)
    _, first, group, sizes = np.unique(np.asarray(groups), return_index=True, return_inverse=True, return_counts=True)
    centered = reward - (np.bincount(group, weights=reward) / sizes)[group]
    num_different = np.bincount(group, weights=reward != reward[first][group])
    centered[num_different[group] == 0] = 0.0
    if settings.normalize:
        divisor = sizes if settings.deviation == "population" else np.maximum(sizes - 1, 1)
        deviation = np.sqrt(np.bincount(group, weights=centered**2) / divisor)
        centered /= deviation[group] + EPSILON
    return centered.astype(np.float32)


def generalized_advantages(
    rewards: Floats,  # [S], what each token earns
    values: Floats,  # [S], before each sampled token
    sampled: npt.NDArray[np.bool_],  # [S]
    lengths: npt.ArrayLike,  # [n], entries of each sample, in order
    *,
    discount: float,
    trace: float,
) -> tuple[Floats, Floats]:
    """Return advantages and returns (A, R), both [S], and 0 at tokens that were not sampled.

    A_t = sum_l (discount trace)^l d_(t+l), R_t = A_t + V_t, with d_t = r_t + discount V_(t+1) - V_t. The index t runs
    over a sample's sampled tokens. V is 0 after the last token.

    Schulman et al., arXiv 1506.02438, eq. 16.
    """
    advantages = np.zeros_like(values)
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    for end, length in zip(ends, np.asarray(lengths), strict=True):
        following = later = 0.0
        for place in np.flatnonzero(sampled[end - length : end])[::-1] + (end - length):
            value = float(values[place])
            later = float(rewards[place]) + discount * following - value + discount * trace * later
            advantages[place], following = later, value
    return advantages, np.where(sampled, advantages + values, 0.0).astype(np.float32)
