"""An agent written with smolagents. Nothing in it knows that it is being trained."""

from __future__ import annotations

import asyncio

from smolagents import LogLevel, OpenAIModel, ToolCallingAgent, tool

from examples.frameworks.games import Player, Tool, main
from penstock.ports.environment import Endpoint


class Answerer(Player):
    """Plays with an agent that must call a tool in each step, and answers with one too."""

    async def answer(self, llm: Endpoint, question: str, tools: list[Tool]) -> str:
        model = OpenAIModel(llm.model, api_base=llm.base_url, api_key=llm.api_key)
        agent = ToolCallingAgent(list(map(tool, tools)), model, max_steps=6, verbosity_level=LogLevel.OFF)
        with model.client:
            return str(await asyncio.to_thread(agent.run, question))


if __name__ == "__main__":
    main(Answerer)
