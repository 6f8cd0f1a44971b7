"""Conversion of tokens back to readable messages, without the text that the chat template put around them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.model.chat import SENTINEL, ChatTokenizer
from penstock.model.files import ModelError
from penstock.model.message_tokens import MessageTokenizer
from penstock.samples import Sample

Message = dict[str, Any]
"""A message with `role` and `content`; that of a policy without tokens also has its calls of tools."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The text that a template puts before and after a user's message."""

    before: tuple[str, ...]
    """Possible texts before the message; the first one that matches counts."""
    after: str

    def inside(self, text: str) -> str:
        """Return the message inside the frame; all of `text` if the frame does not match."""
        before = next((before for before in self.before if text.startswith(before)), None)
        if before is None or not text.endswith(self.after) or len(before) + len(self.after) > len(text):
            return text
        return text[len(before) : len(text) - len(self.after)]


class Transcript:
    """Converts a model's trajectories to messages.

    A prompt that is not a single user message (for example an agent's own prompt) stays as the template rendered it.
    The messages of a policy without tokens are what they were.
    """

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._first, self._later = _frames(chat)

    def messages(self, sample: Sample) -> list[Message]:
        """Return the messages of a trajectory: observations from the user, actions from the assistant."""
        token_ids, found = sample.token_ids.tolist(), list[Message]()
        if isinstance(self._chat, MessageTokenizer):
            return self._chat.transcript(token_ids)
        for said, start, end in _stretches(sample.loss_mask.tobytes()):
            if said:
                found.append(Message(role="assistant", content=self._chat.decode(token_ids[start:end])))
            else:
                text = self._chat.decode(token_ids[start:end], skip_special=False)
                found.append(Message(role="user", content=(self._later if start else self._first).inside(text)))
        return found


def _stretches(mask: bytes) -> Iterator[tuple[bool, int, int]]:
    """Yield (sampled, start, end) for each run of equal values in a loss mask."""
    start = 0
    while start < len(mask):
        end = mask.find(1 - mask[start], start)
        end = len(mask) if end < 0 else end
        yield bool(mask[start]), start, end
        start = end


def _frames(chat: ChatTokenizer) -> tuple[Frame, Frame]:
    """Return the frame of the first message, and the frame of a message after an answer.

    The answer itself may contain its end-of-turn token, so the second frame also matches without that token.
    """
    user = {"role": "user", "content": SENTINEL}
    try:
        before, _, after = chat.render([user]).partition(SENTINEL)
        whole = chat.render([user, {"role": "assistant", "content": SENTINEL}, user])
    except ModelError:
        return Frame((), ""), Frame((), "")
    *_, between, end = whole.split(SENTINEL)
    ends = [chat.decode([eos], skip_special=False) for eos in chat.eos_ids]
    unended = [between.removeprefix(eos) for eos in ends if eos and between.startswith(eos)]
    return Frame((before,), after), Frame((between, *unended), end)
