"""Conversion of arriving tokens to text: stop strings, and text that only grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.samples import Segment

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_CHARACTER = 4
"""Most tokens of a character: its bytes in UTF-8."""
"""A tokenizer decodes an incomplete character to this."""


class Tokenizer(Protocol):
    """A tokenizer, as rollout servers use it."""

    @property
    def longest_token(self) -> int:
        """Number of characters of the longest token."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Additional ends of an answer: stop strings, and stop tokens that are not part of the text."""

    strings: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()
    keep: bool = False
    """Keep the matched stop string or stop token in the text."""

    def end(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
        """Return whether a stop string has just become complete.

        It decodes only the last tokens that can contain a stop string. A character has at most four bytes, and each
        byte may be a separate token."""
        window = 4 * max(map(len, self.strings)) + 4
        text = tokenizer.decode(token_ids[-window:])
        return any(string in text for string in self.strings)

    def without_stop_token(self, token_ids: list[int]) -> list[int]:
        """Return `token_ids` without a stop token at the end."""
        return token_ids[:-1] if not self.keep and token_ids and token_ids[-1] in self.tokens else token_ids

    def shown(self, tokenizer: Tokenizer, segment: Segment) -> str:
        """Return the text of an answer without the stop token or stop string that ended it."""
        is_ended = segment.finish_reason == "stop"
        return self.cut(tokenizer.decode(self.without_stop_token(segment.token_ids) if is_ended else segment.token_ids))

    def matched(self, text: str) -> str | None:
        """Return the stop string that occurs first in `text`, or None."""
        found = [(at, string) for string in self.strings if (at := text.find(string)) >= 0]
        return min(found)[1] if found else None

    def cut(self, text: str) -> str:
        """Return `text` up to the first stop string."""
        matched = self.matched(text)
        return text if matched is None or self.keep else text[: text.find(matched)]

    def without_partial_stop(self, text: str) -> str:
        """Return `text` without an end that may be the beginning of a stop string."""
        if self.keep:
            return text
        beginnings = (string[:length] for string in self.strings for length in range(1, len(string)))
        starts = (len(text) - len(beginning) for beginning in beginnings if text.endswith(beginning))
        return text[: min(starts, default=len(text))]


class GrowingText:
    """The growing text of an answer. Each call decodes only the new tokens, with a few tokens before them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done = self._context = 0
        """Number of tokens with final text; start of the context, which is decoded again because it affects spaces."""
        self.text = ""

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the whole text so far, without an incomplete character at the end."""
        if not token_ids:
            return self.text
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._context : self._done])
        end = len(self._ids)
        now = self._tokenizer.decode(self._ids[self._context :])
        if now.endswith(UNFINISHED):
            if end - self._done <= 2 * LONGEST_CHARACTER:
                return self.text
            end, now = self._end_of_text(end)
        self.text += now[len(before) :]
        self._context, self._done = self._done, end
        return self.text

    def _end_of_text(self, end: int) -> tuple[int, str]:
        """Return where a character ends among the last tokens, which are no text, and the text up to there. If none
        ends there, no character can begin before the last tokens and end after them."""
        for cut in range(end - 1, end - 2 * LONGEST_CHARACTER, -1):
            text = self._tokenizer.decode(self._ids[self._context : cut])
            if not text.endswith(UNFINISHED):
                return cut, text
        cut = end - LONGEST_CHARACTER
        return cut, self._tokenizer.decode(self._ids[self._context : cut])
