"""What environments tell beside observations and rewards."""

from __future__ import annotations

from typing import Any

import msgspec


def plain(value: object) -> Any:
    """As JSON has it; what has no such form as text."""
    if hasattr(value, "tolist"):  # numpy's own
        value = value.tolist()
    try:
        return msgspec.to_builtins(value)
    except (TypeError, ValueError):
        return str(value)
