"""Waiting times in settings: seconds, or a multiple of something that the run measures."""

from __future__ import annotations

import math
import re
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator

SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?) *([a-z]*)")


class WaitTime(NamedTuple):
    """A waiting time that `wait_time` has read from a setting."""

    number: float
    """Seconds, or the multiple."""
    is_relative: bool

    def seconds(self, measured_s: float) -> float:
        """Return the wait in seconds, where `1x` is `measured_s`."""
        return self.number * measured_s if self.is_relative else self.number


def wait_time(setting: str) -> WaitTime:
    """Return the wait of a setting such as `500ms` or `0.25x`. Raises ValueError if it is no wait."""
    found = NUMBER.fullmatch(setting)
    if found is None:
        raise ValueError(f"a wait is a number with a unit, such as 500ms, 2s or 0.25x (got {setting!r})")
    number, unit = float(found[1]), found[2]
    if unit != "x" and unit not in SECONDS:
        has = f"has the unit {unit!r}" if unit else "has no unit"
        units = f"{', '.join(SECONDS)}, or x for a multiple of what the run measures"
        raise ValueError(f"{setting!r} {has}: use one of {units}")
    if number <= 0 or not math.isfinite(number):
        raise ValueError(f"{setting!r} is not above zero")
    return WaitTime(number * SECONDS.get(unit, 1.0), is_relative=unit == "x")


def _checked(setting: object) -> object:
    if isinstance(setting, str | int | float):
        wait_time(str(setting))
    return setting


Wait = Annotated[str, BeforeValidator(_checked)]
"""A setting such as `500ms`, `2s`, `1m` or `0.25x`."""
