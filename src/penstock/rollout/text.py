"""Between tokens and text while tokens arrive: stop strings, and text that only ever grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer makes of the first bytes of a character."""


class Tokenizer(Protocol):
    """What `text` needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """Where an answer ends besides at the model's own end: at a string, or at a token that is not part of its text."""

    strings: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()
    keep: bool = False
    """Leave what matched in the text."""

    def end(self, tokenizer: Tokenizer, token_ids: Sequence[int]) -> bool:
        """Whether a stop string has just become complete. Looks only as far back as one can begin: a character has at
        most four bytes, each perhaps a token of its own."""
        window = 4 * max(map(len, self.strings)) + 4
        text = tokenizer.decode(token_ids[-window:])
        return any(string in text for string in self.strings)

    def spoken(self, token_ids: list[int]) -> list[int]:
        """`token_ids` without a stop token at their end."""
        return token_ids[:-1] if not self.keep and token_ids and token_ids[-1] in self.tokens else token_ids

    def matched(self, text: str) -> str | None:
        """The stop string that comes first in `text`."""
        found = [(at, string) for string in self.strings if (at := text.find(string)) >= 0]
        return min(found)[1] if found else None

    def cut(self, text: str) -> str:
        """`text` up to the first stop string."""
        matched = self.matched(text)
        if matched is None or self.keep:
            return text
        return text[: text.find(matched)]

    def settled(self, text: str) -> str:
        """`text` without an end that may yet turn out to begin a stop string."""
        if self.keep:
            return text
        starts = (
            len(text) - length
            for string in self.strings
            for length in range(1, len(string))
            if text.endswith(string[:length])
        )
        return text[: min(starts, default=len(text))]


class GrowingText:
    """The text of an answer whose tokens arrive bit by bit; decodes only what is new, with a few tokens before it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._done = self._context = 0
        """Tokens whose text is settled; tokens before those that are decoded along, for their influence on spaces."""
        self.text = ""

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """The whole text so far; of a character that is not complete nothing yet."""
        if not token_ids:
            return self.text
        self._ids += token_ids
        before = self._tokenizer.decode(self._ids[self._context : self._done])
        now = self._tokenizer.decode(self._ids[self._context :])
        if not now.endswith(UNFINISHED):
            self.text += now[len(before) :]
            self._context, self._done = self._done, len(self._ids)
        return self.text
