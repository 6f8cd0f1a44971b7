"""An agent as one would write it against any OpenAI endpoint; nothing in `play` knows that it is being trained."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from penstock.envs.guess_number import GuessNumber
from penstock.ports.environment import Endpoint

CLIENT = AsyncOpenAI(base_url="http://unused", api_key="unused")
"""Its connections are shared; where they lead is each episode's own."""


class Guesser(GuessNumber):
    """Plays the number game through an OpenAI client; the game, its hints and its demonstrations are the parent's."""

    async def play(self, llm: Endpoint, seed: int) -> float:
        client = CLIENT.with_options(base_url=llm.base_url, api_key=llm.api_key)
        question, _ = self.reset(seed)
        messages: list[Any] = [{"role": "user", "content": question}]
        while True:
            reply = await client.chat.completions.create(model=llm.model, messages=messages)
            answer = reply.choices[0].message
            hint, reward, terminated, truncated, _ = self.step(answer.content or "")
            if terminated or truncated:
                return reward
            messages += [answer, {"role": "user", "content": hint}]
