"""An agent that never sends its history: it tells the policy in a few words what it knows so far."""

from __future__ import annotations

from examples.agent.guesser import CLIENT
from penstock.envs.guess_number import GuessNumber
from penstock.ports.environment import Endpoint


class Compacting(GuessNumber):
    """Plays the number game. Each question is the range that is left, and a branch of the episode."""

    async def play(self, llm: Endpoint, seed: int) -> float:
        client = CLIENT.with_options(base_url=llm.base_url, api_key=llm.api_key)
        self.reset(seed)
        while True:
            known = f"{self._low}-{self._high}"
            reply = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": known}])
            _, reward, terminated, truncated, _ = self.step(reply.choices[0].message.content or "")
            if terminated or truncated:
                return reward
