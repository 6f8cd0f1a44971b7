"""Waiting times in settings: seconds, or a multiple of something that the run measures."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?) *([a-z]*)")


def seconds_of(wait: str, measured_s: float) -> float:
    """Return a wait in seconds, where `1x` is `measured_s`. Raises ValueError if it is no wait."""
    number, unit = _parts(wait)
    return number * (measured_s if unit == "x" else SECONDS[unit])


def is_relative(wait: str) -> bool:
    """Return whether a wait is a multiple of something measured."""
    return _parts(wait)[1] == "x"


def _parts(wait: str) -> tuple[float, str]:
    found = NUMBER.fullmatch(wait)
    if found is None:
        raise ValueError(f"a wait is a number with a unit, such as 500ms, 2s or 0.25x (got {wait!r})")
    number, unit = float(found[1]), found[2]
    if unit != "x" and unit not in SECONDS:
        has = f"has the unit {unit!r}" if unit else "has no unit"
        raise ValueError(
            f"{wait!r} {has}: use one of {', '.join(SECONDS)}, or x for a multiple of what the run measures"
        )
    if number <= 0 or not math.isfinite(number):
        raise ValueError(f"{wait!r} is not above zero")
    return number, unit


def _checked(wait: object) -> object:
    if isinstance(wait, str | int | float):
        _parts(str(wait))
    return wait


Wait = Annotated[str, BeforeValidator(_checked)]
"""A setting such as `500ms`, `2s`, `1m` or `0.25x`."""
