"""What environments tell beside observations and rewards."""

from __future__ import annotations

from typing import Any

import msgspec


def plain(value: object) -> Any:
    """As JSON has it; what has no such form as text."""
    try:
        return msgspec.to_builtins(value, enc_hook=_as_text)
    except (TypeError, ValueError):
        return str(value)


def _as_text(value: object) -> Any:
    try:
        return of_numpy(value)
    except TypeError:
        return str(value)


def of_numpy(value: Any) -> Any:
    """Its numbers and arrays as Python's own. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot leave its process")
