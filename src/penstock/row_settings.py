"""Settings that a row of the data carries for its own task: how long and how warm its answers may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_NEW_TOKENS = "max_new_tokens"
"""Key of a row that bounds the tokens per turn of its task, below the bound of its environment."""
TEMPERATURE = "temperature"
"""Key of a row with the sampling temperature of its task in training, instead of that of the run."""
COLDEST, HOTTEST = 1e-3, 2.0
"""Bounds of a row's temperature. Greedy tokens have no log-probabilities that could be trained. A larger number is more
likely a fact of the task, such as the weather."""


def own_limit(row: Mapping[str, Any]) -> int | None:
    """Return the limit that a row carries; None if it has none. Raises ValueError if it is no positive whole number."""
    limit = row.get(MAX_NEW_TOKENS)
    if limit is None:
        return None
    if type(limit) is not int or limit < 1:
        raise ValueError(f"{MAX_NEW_TOKENS} is {str(limit)[:80]!r}: it must be a whole number above zero")
    return limit


def own_temperature(row: Mapping[str, Any]) -> float | None:
    """Return the temperature that a row carries; None if it has none. Raises ValueError if it cannot be trained."""
    temperature = row.get(TEMPERATURE)
    if temperature is None:
        return None
    if type(temperature) not in (int, float) or not COLDEST <= temperature <= HOTTEST:
        raise ValueError(
            f"{TEMPERATURE} is {str(temperature)[:80]!r}: it must be a number from {COLDEST:g} to {HOTTEST:g}"
        )
    return float(temperature)
