"""An Atropos environment as anybody writes one: nothing in it knows who trains. Answer in the case asked for."""

from __future__ import annotations

import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

MAX_TOKENS = 8


class Letters(BaseEnv):
    name = "letters"

    @classmethod
    def config_init(cls) -> Any:
        env = BaseEnvConfig(tokenizer_name="runs/atropos/model", group_size=8, use_wandb=False)
        policy = APIServerConfig(
            model_name="tiny",
            tokenizer_name=env.tokenizer_name,
            base_url="http://localhost:8000/v1",
            api_key="none",
            server_type="sglang",
        )
        return env, [policy]

    async def setup(self) -> None:
        pass

    async def get_next_item(self) -> str:
        return random.choice(["small", "LARGE"])

    async def collect_trajectories(self, item: str) -> Any:
        async with self.server.managed_server(tokenizer=self.tokenizer) as policy:
            await policy.chat_completion(
                messages=[{"role": "user", "content": item}],
                n=self.config.group_size,
                max_tokens=MAX_TOKENS,
                temperature=1.0,
            )
            nodes = policy.get_state()["nodes"]
        return ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            scores=[self.score(item, node) for node in nodes],
        ), []

    def score(self, item: str, node: Any) -> float:
        """The share of letters in the right case among all that there was room for."""
        said = self.tokenizer.decode([token for token in node.masked_tokens if token != -100])
        right = str.islower if item == "small" else str.isupper
        return sum(map(right, said)) / MAX_TOKENS

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass


if __name__ == "__main__":
    Letters.cli()
