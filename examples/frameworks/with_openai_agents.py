"""An agent written with the OpenAI Agents SDK. Nothing in it knows that it is being trained."""

from __future__ import annotations

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

from examples.frameworks.games import Player, Tool, main
from penstock.ports.environment import Endpoint

set_tracing_disabled(True)


class Answerer(Player):
    """Plays with the Responses API, the SDK's default."""

    async def answer(self, llm: Endpoint, question: str, tools: list[Tool]) -> str:
        async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            agent = Agent(
                name="player",
                instructions="Use the tool, then answer.",
                model=OpenAIResponsesModel(llm.model, client),
                tools=[function_tool(each) for each in tools],
            )
            try:
                result = await Runner.run(agent, question, max_turns=6)
            except AgentsException:  # the policy called a tool that does not exist, or did not come to an end
                return ""
            return str(result.final_output)


if __name__ == "__main__":
    main(Answerer)
