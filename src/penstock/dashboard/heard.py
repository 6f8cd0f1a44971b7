"""What a policy was told: the messages in the tokens of an observation.

Messages begin and end at control tokens, which only the chat template writes. So text of an observation that spells one
begins no message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.model.chat import ChatTokenizer

Message = dict[str, Any]
"""`role`, `content`, and for the assistant `thinking` and `tool_calls`."""

OPENS = frozenset(("<|im_start|>", "<|start_header_id|>", "<|header_start|>", "<start_of_turn>", "<|start_of_role|>"))
"""Control tokens after which the text names a role."""
AFTER_ROLE = frozenset(("<|end_header_id|>", "<|header_end|>", "<|end_of_role|>"))
ROLE = re.compile(r"<?[|｜\[]?/?(system|user|assistant|tool|observation|model)[|｜\]]?>?", re.IGNORECASE)
"""A control token that names a role itself: `<|user|>`, `<｜Assistant｜>`."""
NAMES = {"model": "assistant", "observation": "tool", "ipython": "tool", "environment": "tool"}
RESPONSE = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>", re.DOTALL)
PROMPT = "prompt"
"""Role of text outside of messages."""


def messages_in(chat: ChatTokenizer, token_ids: Sequence[int]) -> list[Message]:
    """Return the messages of an observation, without the beginning of the answer that follows."""
    found: list[Message] = []
    role, is_header = "", False
    for control, text in _parts(chat, token_ids):
        if control in OPENS:
            role, newline, content = text.partition("\n")
            role, is_header = role.strip(), not newline
            if newline and content.strip():
                found.append(_message(role, content))
            elif newline:
                found.append(_message(role, ""))
            continue
        if control in AFTER_ROLE and is_header:
            found.append(_message(role, text))
            is_header = False
            continue
        is_header = False
        if (named := ROLE.fullmatch(control)) is not None:
            found.append(_message(named[1], text))
        elif text.strip():
            found.append(_message(PROMPT, text))
    if found and found[-1]["role"] == "assistant":
        found.pop()  # it begins the answer
    return [each for message in found if message["content"].strip() for each in _of_tools(message)]


def _parts(chat: ChatTokenizer, token_ids: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield (control token, text up to the next one); text before the first control token comes after an empty one."""
    special, start, control = chat.special_ids, 0, ""
    for place, token in enumerate([*token_ids, -1]):
        if token in special or token == -1:
            if control or place > start:
                yield control, chat.decode(token_ids[start:place], skip_special=False)
            start = place + 1
            control = "" if token == -1 else chat.decode([token], skip_special=False)


def _message(role: str, content: str) -> Message:
    role = role.lower()
    return {"role": NAMES.get(role, role) or PROMPT, "content": content.strip("\n")}


def _of_tools(message: Message) -> list[Message]:
    """Return the answers of tools that a message holds (Hermes, Qwen); any other message as it is."""
    content = message["content"]
    if message["role"] not in ("user", "tool") or not content.lstrip().startswith("<tool_response>"):
        return [message]
    if RESPONSE.sub("", content).strip():
        return [message]
    return [{"role": "tool", "content": found[1]} for found in RESPONSE.finditer(content)]
