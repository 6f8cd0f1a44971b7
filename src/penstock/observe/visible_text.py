"""Text that a terminal shows as it is (standard library only).

A policy, a task, an environment or a client may put characters into its text that a terminal obeys or hides: escape
sequences move the cursor, rename the window or make a link; bidirectional controls reorder what is read.
"""

from __future__ import annotations

import json
import re
import unicodedata

CANDIDATE = re.compile(r"[^\n\t -~]")
BLANK = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
"""Letters, symbols and marks that show nothing. Variation selectors are among them: a row of them can hold any text."""


def visible(text: str) -> str:
    """Return `text` with each character that a terminal would obey or hide as an escape: `\\x1b`, `\\u202e`. New lines,
    tabs and spaces stay."""
    return text if text.isascii() and text.isprintable() else CANDIDATE.sub(_shown, text)


def visible_json(text: str) -> str:
    """Return JSON with the same value in which no character is one that a terminal would obey or hide."""
    return CANDIDATE.sub(lambda match: match[0] if _is_shown(match[0]) else json.dumps(match[0])[1:-1], text)


def _shown(match: re.Match[str]) -> str:
    return match[0] if _is_shown(match[0]) else _escape(ord(match[0]))


def _is_shown(character: str) -> bool:
    return character not in BLANK and (character.isprintable() or unicodedata.category(character) == "Zs")


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
