"""Conversion of text and conversations to tokens, bounded in size and time.

Neither a long text nor a chat template may hold up the event loop, on which the server answers `/health`: both run in
threads (`model/text_threads.py`). Requests with token ids or short text need no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from penstock.model.text_threads import INLINE_CHARACTERS, in_text_thread
from penstock.rollout import bodies
from penstock.rollout.request import ContextExceeded
from penstock.rollout.text import Tokenizer

MAX_BATCH = 1024
"""Maximum number of prompts in one body."""
WAITER = "server"


class PromptText:
    """Makes the tokens of prompts. Refuses text that is too long for the context before it is tokenised."""

    def __init__(self, tokenizer: Tokenizer, *, max_context: int, renders_inline: bool = False) -> None:
        """`renders_inline`: short conversations need no thread either. An environment worker sets this, because it
        renders observations with the same template on its event loop."""
        self._tokenizer, self._renders_inline = tokenizer, renders_inline
        self._max_characters = max_context * tokenizer.longest_token
        of_tokens = f"{max_context} tokens of at most {tokenizer.longest_token} characters"
        self._reason = f"this model's maximum context length is {of_tokens}"

    async def tokenised(self, body: bodies.GenerateBody) -> bodies.GenerateBody:
        """Return the body with `input_ids` instead of `text`. Raises ValueError for text that cannot be a prompt."""
        if body.text is None or body.input_ids is not None:
            return body
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not 0 < len(texts) <= MAX_BATCH:
            raise ValueError(f"a batch has between 1 and {MAX_BATCH} prompts, not {len(texts)}")
        longest = max(map(len, texts))
        if longest > self._max_characters:
            raise self._too_long(f"a text of {longest} characters")
        encode = partial(_each, self._tokenizer.encode, texts)
        is_short = sum(map(len, texts)) <= INLINE_CHARACTERS
        ids: list[Any] = encode() if is_short else await in_text_thread(encode, waiter=WAITER)
        return msgspec.structs.replace(body, text=None, input_ids=ids[0] if isinstance(body.text, str) else ids)

    async def rendered(self, render: Callable[[], list[int]], *parts: object) -> list[int]:
        """Return the tokens of a conversation that consists of `parts`. Raises ValueError if it is too long."""

        def checked() -> list[int]:
            self.check(*parts)
            return render()

        short = min(INLINE_CHARACTERS, self._max_characters)
        if self._renders_inline and not has_more_characters(parts, short):
            return render()
        return await in_text_thread(checked, waiter=WAITER)

    def check(self, *parts: object) -> None:
        """Raise `ContextExceeded` for a conversation of `parts` that is too long."""
        if has_more_characters(parts, self._max_characters):
            raise self._too_long(f"a conversation of more than {self._max_characters} characters")

    def _too_long(self, what: str) -> ContextExceeded:
        return ContextExceeded(f"{what} cannot fit: {self._reason}; shorten it")


def has_more_characters(value: object, most: int) -> bool:
    """Return whether a JSON value has more than `most` characters: those of its strings and keys, and one for each
    other value."""
    left, count = [value], 0
    while left and count <= most:
        match left.pop():
            case str() as text:
                count += len(text)
            case dict() as fields:
                left += [*fields, *fields.values()]
                count += not fields
            case list() | tuple() as values:
                left += values
                count += not values
            case _:
                count += 1
    return count > most


def _each(encode: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int]]:
    return [encode(text) for text in texts]
