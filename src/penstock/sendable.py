"""Values and texts that a message between processes can carry."""

from __future__ import annotations

from itertools import chain

import msgspec

MAX_DEPTH = 100
"""Maximum nesting of a value. The receiver of a deeper one could run out of stack."""
MAX_CHARS = 2_000
"""A longer message of an exception is cut."""


def fault_of(value: object, depth: int = 1) -> str | None:
    """Return what keeps a value from being sent to another process; None if it can be sent."""
    if value is None or type(value) in (float, bool):  # their subclasses are encoded differently, or not at all
        return None
    if type(value) is str:
        return None if value.isascii() or _is_text(value) else "text with a lone surrogate"
    if type(value) is int:
        return None if -(2**63) <= value < 2**64 else "an integer of more than 64 bits"
    if not isinstance(value, dict | list | tuple):
        return _fault_of_other(value)
    if depth > MAX_DEPTH:
        return f"values that are nested more than {MAX_DEPTH} deep"
    parts = chain(value.keys(), value.values()) if isinstance(value, dict) else value
    return next((fault for each in parts if (fault := fault_of(each, depth + 1))), None)


def encodable(text: str) -> str:
    """Return text without lone surrogates, which no tokenizer and no message can carry. `json.loads` makes them of
    half an escape."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def sendable(text: str, max_chars: int = MAX_CHARS) -> str:
    """Return text that a message can carry: at most `max_chars` characters, and no lone surrogate. Errors may quote
    what a policy said."""
    shown = text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text)} characters)"
    return encodable(shown)


def _fault_of_other(value: object) -> str | None:
    """Return what keeps a value of a type that JSON lacks from being sent."""
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
