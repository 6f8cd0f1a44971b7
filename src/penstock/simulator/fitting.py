"""Least squares for the times of modelled machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from penstock.config import EngineModelConfig, TrainerModelConfig
from penstock.rollout.costs import TERMS

Floats = npt.NDArray[np.float64]

ADMIT_SHARE, ADMIT_TOKENS = 0.125, 4096
"""The values with which the engine fills its slots; see `rollout/admission.py`."""


def fit_engine(sums: Mapping[str, float], *, update_s: float, stretch: float = 1.0) -> EngineModelConfig:
    """Fit the seconds of a step as a linear function of active sequences, the tokens they hold, and prompt tokens.

    `sums`: sums of products over the decode steps (`rollout/costs.py`). `stretch`: seconds of the clock that counts,
    for each second of the clock of `sums`.
    """

    def total(one: str, other: str) -> float:
        return sums.get(one + other) or sums.get(other + one, 0.0)

    *terms, seconds = TERMS
    matrix = np.array([[total(one, other) for other in terms] for one in terms])
    step_s, sequence_s, context_s, prefill_s = non_negative(matrix, np.array([total(each, seconds) for each in terms]))
    return EngineModelConfig(
        step_s=max(step_s * stretch, 1e-9),
        sequence_s=sequence_s * stretch,
        context_token_s=context_s * stretch,
        prefill_token_s=prefill_s * stretch,
        update_s=update_s,
        admit_share=ADMIT_SHARE,
        admit_tokens=ADMIT_TOKENS,
    )


def fit_calls(calls: Sequence[tuple[int, int, bool, float]]) -> TrainerModelConfig:
    """Fit the seconds of the learner's calls as a linear function of a call, its tokens and an optimizer step.

    `calls`: groups, tokens, whether an optimizer step and the publication followed, seconds.
    """
    rows = np.array([(float(groups > 0), tokens, step) for groups, tokens, step, _ in calls], dtype=np.float64)
    seconds = np.array([each for *_, each in calls], dtype=np.float64)
    call_s, token_s, step_s = non_negative(rows.T @ rows, rows.T @ seconds)
    return TrainerModelConfig(call_s=call_s, token_s=token_s, step_s=step_s)


def non_negative(matrix: Floats, vector: Floats) -> list[float]:
    """Return argmin x'Mx - 2v'x over x >= 0. The function tries every set of unknowns that may be positive; there are
    at most four unknowns."""
    best, found = 0.0, np.zeros(len(vector))
    scale = np.sqrt(np.maximum(np.diag(matrix), 1e-300))
    scaled, target = matrix / np.outer(scale, scale), vector / scale
    for size in range(1, len(vector) + 1):
        for chosen in combinations(range(len(vector)), size):
            part = np.ix_(chosen, chosen)
            values = np.linalg.lstsq(scaled[part], target[list(chosen)], rcond=1e-12)[0]
            loss = float(values @ scaled[part] @ values - 2 * target[list(chosen)] @ values)
            if (values >= 0).all() and loss < best - 1e-12 * abs(best):
                best, found = loss, np.zeros(len(vector))
                found[list(chosen)] = values
    return [float(value) for value in found / scale]
