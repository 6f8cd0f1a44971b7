"""Policies that get messages and answer with text: without tokens, log-probabilities and versions.

Their tokens are those of `MessageTokenizer`. Their log-probabilities are NaN, and their version is `NO_VERSION`.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

from penstock.model.message_tokens import Chat, MessageTokenizer, call_text
from penstock.model.random_answers import random_arguments, random_word
from penstock.rollout.generator import all_of
from penstock.rollout.session import RolloutError
from penstock.samples import Segment, VersionSpan
from penstock.seeding import stable_seed
from penstock.types import NO_VERSION, Sampling, SegmentGrant

BEGUN_NAME = re.compile(r'"name": "([^"]+)"')


class Said(NamedTuple):
    """An answer."""

    content: str
    calls: Sequence[str] = ()
    """Calls of tools, as text."""
    is_finished: bool = True
    """Whether the answer ended by itself, and not at its limit of tokens."""


class MessagePolicy(ABC):
    """`ports.PolicyClient` of a policy without tokens. `name` stands in errors."""

    name: str

    def __init__(self) -> None:
        self._chat = MessageTokenizer()

    @abstractmethod
    async def answer(self, chat: Chat, sampling: Sampling, max_tokens: int, seed: int) -> Said:
        """Return the next answer of a conversation. `chat.begun`: the beginning of a call that it must make."""

    def counts(self) -> Mapping[str, float]:
        """Return counters since the start."""
        return {}

    async def close(self) -> None:  # noqa: B027 (a policy without connections has nothing to close)
        """Close the connections."""

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """Return one whole answer per grant. The grant limits the tokens of the policy, not those of the segment."""
        try:
            chat = self._chat.chat(prompt_ids)
        except ValueError as error:
            raise RolloutError(self.name, str(error), 400) from None
        place = len(prompt_ids)
        pairs = zip(grants, seeds, strict=True)
        return await all_of(self._segment(chat, sampling, each, stable_seed(seed, place)) for each, seed in pairs)

    async def _segment(self, chat: Chat, sampling: Sampling, grant: SegmentGrant, seed: int) -> Segment:
        said = await self.answer(chat, sampling, grant.max_tokens, seed)
        text = "\n".join(filter(None, ("" if chat.begun else said.content, *said.calls)))
        if not text.startswith(chat.begun):
            raise RolloutError(self.name, "answered without the call that `tool_choice` demands", 400)
        token_ids = self._chat.answer_ids(text[len(chat.begun) :])
        if not said.is_finished:
            token_ids = token_ids[:-1]
        return Segment(
            token_ids=token_ids,
            logprobs=[math.nan] * len(token_ids),
            spans=[VersionSpan(NO_VERSION, 0, len(token_ids))],
            finish_reason="stop" if said.is_finished else "length",
        )


def demanded(begun: str) -> str | None:
    """Return the name of the tool that the begun call asks for. Empty: any tool. None: no call has begun."""
    if not begun:
        return None
    named = BEGUN_NAME.search(begun)
    return named[1] if named else ""


class RandomPolicy(MessagePolicy):
    """Answers at once and at random, the same in the same place of an episode: a word, or the call of a tool."""

    name = "random"

    async def answer(self, chat: Chat, sampling: Sampling, max_tokens: int, seed: int) -> Said:
        draw, heard = Random(seed), str(chat.messages[-1].get("content") or "") if chat.messages else ""
        wanted = demanded(chat.begun)
        tools = [each for each in chat.tools if not wanted or each["function"]["name"] == wanted]
        chosen = draw.choice([*tools, *([None] if wanted is None else [])])
        if chosen is None:
            return Said(random_word(draw, heard))
        return Said("", [call_text(chosen["function"]["name"], random_arguments(draw, chosen, heard))])
