"""Values of rows that cannot be sent to another process."""

from __future__ import annotations

from itertools import chain

import msgspec

MAX_DEPTH = 100
"""Maximum nesting of a row."""


def fault_of(value: object, depth: int = 1) -> str | None:
    """Return what keeps a value from being sent to another process; None if it can be sent."""
    if isinstance(value, str):
        return None if value.isascii() or _is_text(value) else "text with a lone surrogate"
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else "an integer of more than 64 bits"
    if not isinstance(value, dict | list | tuple):
        return None
    if depth > MAX_DEPTH:
        return f"values that are nested more than {MAX_DEPTH} deep"
    parts = chain(value.keys(), value.values()) if isinstance(value, dict) else value
    return next((fault for each in parts if (fault := fault_of(each, depth + 1))), None)


def unsendable(value: object) -> str | None:
    """Return what keeps a value of a type that JSON lacks from being sent; None if it can be sent."""
    try:
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError) as error:
        return f"a value that cannot be sent ({error})"
    return None


def _is_text(value: str) -> bool:
    """Return whether a string can be encoded: it has no lone surrogate."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
