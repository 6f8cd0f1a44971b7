"""Disguise of text: private-use characters in the place of its own, as many as it has, which a chat template renders
like any other text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from penstock.model.files import ModelError
from penstock.model.spellings import SPACES

KEPT = frozenset(SPACES + '"\\\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000')
"""Characters without a disguise: those that templates trim, and those that JSON escapes."""
PRIVATE = re.compile("[\U000f0000-\U0010fffd]")
FIRST_PRIVATE, LAST_PRIVATE = 0xF0000, 0x10FFFD
CALLS = ("tool_calls", "function_call")
"""Parts of an assistant's message that are not its answer."""

Message = Mapping[str, Any]
Change = Callable[[str], str]


class Disguise(dict[int, str]):
    """Maps the numbers of characters to private-use characters. Each character gets its own at its first use."""

    def __init__(self) -> None:
        self.real: dict[int, str] = {}
        """The way back."""

    def __missing__(self, code: int) -> str:
        character = stand_in = chr(code)
        if character not in KEPT:
            free = FIRST_PRIVATE + len(self.real)
            if free > LAST_PRIVATE:
                raise ModelError("a conversation with control tokens in its text has too many different characters")
            stand_in = chr(free)
            self.real[free] = character
        self[code] = stand_in
        return stand_in


@dataclass(frozen=True, slots=True)
class Strings:
    """Visits the strings of a conversation, apart from the words that a template compares with its own."""

    keys: Set[str]
    """Words that the template may look for: as keys, as types, or as settings."""
    text: Change
    answer: Change
    """Called for each string, and for each string of the assistant's answers. Their results replace the strings."""

    def settings(self, settings: Message) -> Message:
        """Return the settings of the template with their strings replaced. A setting that is a word of the template
        stays."""
        return {name: self._word(each, self.text) for name, each in settings.items()}

    def message(self, message: Message) -> Message:
        """Return a message with its strings replaced. Its role stays."""
        said = self.answer if message.get("role") == "assistant" else self.text
        return {
            self._key(key): each if key == "role" else self._value(each, self.text if key in CALLS else said)
            for key, each in message.items()
        }

    def _value(self, value: Any, change: Change) -> Any:
        if isinstance(value, str):
            return change(value)
        if isinstance(value, dict | Mapping):
            return {
                self._key(key): (self._word if key == "type" else self._value)(each, change)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value(each, change) for each in value]
        return value

    def _word(self, value: Any, change: Change) -> Any:
        return value if isinstance(value, str) and value in self.keys else self._value(value, change)

    def _key(self, key: Any) -> Any:
        return key if key in self.keys or not isinstance(key, str) else self.text(key)


def has_private(text: str) -> bool:
    """Return whether a text already has characters that would be mistaken for a disguise."""
    return not text.isascii() and PRIVATE.search(text) is not None


def conversation(messages: Sequence[Message], settings: Message, strings: Strings) -> tuple[list[Message], Message]:
    """Return the messages of a conversation and the settings of its template, with their strings replaced."""
    return [strings.message(message) for message in messages], strings.settings(settings)
