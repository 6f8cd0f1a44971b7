"""A tokenizer whose tokens are letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.model.answer_format import AnswerFormat


class Letters:
    """A tokenizer: one token per character. Conversations are the contents, a space between."""

    longest_token = 1
    answers = AnswerFormat.of("<think></think><tool_call></tool_call>")

    def encode(self, text: str) -> list[int]:
        return [(ord(character) - ord("@")) % 64 for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(chr(ord("@") + token) for token in token_ids)

    def prompt(self, messages: Sequence[dict[str, Any]], **settings: Any) -> list[int]:
        if any(message["content"] == "REFUSE" for message in messages):
            raise RuntimeError("roles must alternate")
        tools = [tool["function"]["name"] for tool in settings.get("tools", ())]
        return self.encode(" ".join([*tools, *(message["content"] for message in messages)]))
