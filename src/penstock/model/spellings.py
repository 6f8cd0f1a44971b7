"""Recognition of text that spells a control token, or might do so together with the text around it."""

from __future__ import annotations

import re
from collections.abc import Iterable

SPACES = " \t\n\r\v\f▁"


class Spellings:
    """The spellings of a set of tokens."""

    def __init__(self, tokens: Iterable[str]) -> None:
        words = {token for token in tokens if token}
        self._longest = max(map(len, words), default=0)
        self._firsts, self._lasts = {word[0] for word in words}, {word[-1] for word in words}
        self._beginnings = tuple({word[:end] for word in words for end in range(1, len(word))})
        self._ends = tuple({word[start:] for word in words for start in range(1, len(word))})
        self._inner = {beginning[start:] for beginning in self._beginnings for start in range(1, len(beginning))}
        self._whole = any_of(words)

    def might_be_in(self, text: str) -> bool:
        """Return whether `text` has a whole token, begins or ends with a part of one, or is the inside of one."""
        has_first, has_last = _has(text, self._firsts), _has(text, self._lasts)
        core = text.strip(SPACES)
        return (
            (has_first and core.endswith(self._beginnings))
            or (has_last and core.startswith(self._ends))
            or (has_first and has_last and self._whole.search(core) is not None)
            or (len(core) < self._longest and core in self._inner)
        )


def any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds each of `words`, the longest first, as its only group; nothing if there are none."""
    known = set(words)
    try:
        return re.compile(f"({_branches(_trie(known)) if known else '(?!)'})")
    except RecursionError:  # words of a thousand characters, or as many that begin with each other
        longest_first = sorted(known, key=lambda word: (-len(word), word))
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


Trie = dict[str, "Trie"]
"""Words by their next character. The empty key marks the end of a word."""


def _trie(words: Iterable[str]) -> Trie:
    root: Trie = {}
    for word in words:
        node = root
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def _branches(trie: Trie) -> str:
    """Return the pattern of a node. A search tries few branches at each character, where a list of thousands of words
    would be tried one by one."""
    found = [re.escape(character) + _branches(trie[character]) for character in sorted(trie) if character]
    if "" not in trie:
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"
    return f"(?:{'|'.join(found)})?" if found else ""


def _has(text: str, characters: Iterable[str]) -> bool:
    for character in characters:  # noqa: SIM110 - `any` with a generator is three times as slow
        if character in text:
            return True
    return False
