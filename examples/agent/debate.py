"""Two agents in one episode: each answers, hears the other one, and answers again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

from examples.agent.guesser import CLIENT
from penstock.ports.environment import Endpoint
from penstock.types import Task

DEBATERS = 2


class Debate:
    """Which number is larger? The reward is the share of right last answers, and each debater learns from its own.
    `reset` and `step` ask the same of a policy that answers alone, for the warm start."""

    def __init__(self, task: Task) -> None:
        self._numbers = [0, 0]

    @property
    def _right(self) -> str:
        return str(max(self._numbers))

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._numbers = random.Random(seed).sample(range(10, 100), 2)
        return " ".join(map(str, self._numbers)), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action.strip() == self._right), True, False, {"expected": self._right}

    def demonstrate(self) -> str:
        """Return the larger number."""
        return self._right

    async def play(self, llm: Endpoint, seed: int) -> float:
        client = CLIENT.with_options(base_url=llm.base_url, api_key=llm.api_key)
        question, _ = self.reset(seed)

        async def answer(*said: str) -> str:
            """Return what follows in a conversation of questions and own answers."""
            roles = ("user", "assistant")
            messages: list[Any] = [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]
            reply = await client.chat.completions.create(model=llm.model, messages=messages)
            return reply.choices[0].message.content or ""

        first = await asyncio.gather(*(answer(question) for _ in range(DEBATERS)))
        heard = reversed(first)
        last = await asyncio.gather(
            *(answer(question, mine, f"or {other}") for mine, other in zip(first, heard, strict=True))
        )
        return sum(text.strip() == self._right for text in last) / DEBATERS

    def credit(self, reward: float, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
        """Return the reward of each debater's conversation: whether its own last answer is right."""
        return [float(messages[-1]["content"].strip() == self._right) for messages in conversations]
