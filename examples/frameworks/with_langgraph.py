"""An agent written with LangChain and LangGraph. Nothing in it knows that it is being trained."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from openai import DefaultAsyncHttpxClient
from pydantic import SecretStr

from examples.frameworks.games import Player, Tool, main
from penstock.ports.environment import Endpoint


class Answerer(Player):
    """Plays with a graph that calls the model and its tools in turn."""

    async def answer(self, llm: Endpoint, question: str, tools: list[Tool]) -> str:
        async with DefaultAsyncHttpxClient() as http:
            model = ChatOpenAI(
                model=llm.model, base_url=llm.base_url, api_key=SecretStr(llm.api_key), http_async_client=http
            )
            agent = create_agent(model, tools, system_prompt="Use the tool, then answer.")
            try:
                state = await agent.ainvoke({"messages": [("user", question)]}, {"recursion_limit": 12})
            except GraphRecursionError:  # the policy did not come to an end
                return ""
            return str(state["messages"][-1].text)


if __name__ == "__main__":
    main(Answerer)
