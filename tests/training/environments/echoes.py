"""An Atropos environment that speaks OpenAI's chat for two turns, and makes tokens of the words by itself."""

from __future__ import annotations

import asyncio
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataItem

MAX_TOKENS = 6


class Echoes(BaseEnv):
    name = "echoes"

    @classmethod
    def config_init(cls) -> Any:
        policy = APIServerConfig(model_name="tiny", base_url="http://localhost:8000/v1", api_key="none")
        return BaseEnvConfig(group_size=4, use_wandb=False), [policy]

    async def setup(self) -> None:
        self.num_items = 0

    async def get_next_item(self) -> int:
        self.num_items += 1
        return self.num_items

    async def collect_trajectory(self, item: int) -> Any:
        chat: list[dict[str, str]] = []
        for word in ("a", "b"):
            chat.append({"role": "user", "content": f"{word}{item % 5}"})
            reply = await self.server.chat_completion(messages=chat, n=1, max_tokens=MAX_TOKENS, temperature=1.0)
            await asyncio.sleep(0.01)
            chat.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        tokens, mask = self.tokens_of(chat)
        score = sum(map(str.islower, chat[1]["content"] + chat[3]["content"])) / (2 * MAX_TOKENS)
        return ScoredDataItem(tokens=tokens, masks=mask, scores=score), []

    def tokens_of(self, chat: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        """All of it, the assistant's turns to be trained."""
        tokens: list[int] = self.tokenizer.apply_chat_template(chat, return_dict=False)
        mask = [-100] * len(tokens)
        for place in (1, 3):
            before = self.tokenizer.apply_chat_template(chat[:place], add_generation_prompt=True, return_dict=False)
            after = self.tokenizer.apply_chat_template(chat[: place + 1], return_dict=False)
            mask[len(before) : len(after)] = tokens[len(before) : len(after)]
        return tokens, mask

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


if __name__ == "__main__":
    Echoes.cli()
