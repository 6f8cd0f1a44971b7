"""An agent cannot fill the memory of its worker with conversations that get no answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.compat.gateway import MAX_WAITING, AgentGateway
from penstock.config import TinyModelConfig
from penstock.envs.agents import Answered, Asked, Over
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.runtime.http_server import bind, listening, url_of
from penstock.samples import Segment


class Talk:
    """A conversation that answers messages with an `a` at their beginning, and has no turn for others."""

    name, max_context = "talk", 4096

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat

    def refused(self, message: str) -> None:
        """Nothing is counted here."""

    def prompt(self, messages: Any, **settings: Any) -> tuple[list[int], Asked]:
        return self._chat.prompt(messages, **settings), Asked(messages, settings)

    async def answer(self, prompt_ids: list[int], max_tokens: int, asked: Any = None, **ends: Any) -> Answered:
        if not asked.messages[0]["content"].startswith("a"):
            raise Over("max_turns", "no turn is left")
        answer = Segment(token_ids=self._chat.encode("b"), logprobs=[-1.0], spans=[], finish_reason="stop")
        return Answered(0, answer)


@asynccontextmanager
async def episode(directory: Path) -> AsyncIterator[tuple[Any, aiohttp.ClientSession]]:
    """The session of one episode, and a client of its endpoint."""
    write_tiny_model(directory, TinyModelConfig(), 512)
    chat = ChatTokenizer.load(directory)
    gateway, listener = AgentGateway(chat, model_name="tiny"), bind("127.0.0.1", 0)
    gateway.url = url_of("127.0.0.1", listener)
    async with listening(gateway, listener):
        endpoint = await gateway.open(Talk(chat))  # type: ignore[arg-type]
        async with aiohttp.ClientSession(f"{endpoint.base_url}/") as client:
            yield gateway._sessions[endpoint.api_key], client
        await gateway.close(endpoint)


async def say(client: aiohttp.ClientSession, text: str, **fields: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": text}]} | fields
    async with client.post("chat/completions", json=body) as response:
        return response.status, await response.json()


def kept(session: Any) -> int:
    return max(len(each) for each in (session._asked, session._replies))


@pytest.mark.parametrize(
    ("fields", "most"), [({}, MAX_WAITING), ({"presence_penalty": 1}, MAX_WAITING)], ids=["no turn", "no answer asked"]
)
async def test_refused_conversations_are_forgotten(tmp_path: Path, fields: dict[str, Any], most: int) -> None:
    async with episode(tmp_path) as (session, client):
        for number in range(MAX_WAITING + 10):
            assert (await say(client, f"x{number}", **fields))[0] == 400
        assert kept(session) <= most and len(session._replies) == 0
        assert (await say(client, "a"))[0] == 200, "the episode goes on"


async def test_answered_conversations_are_remembered(tmp_path: Path) -> None:
    async with episode(tmp_path) as (session, client):
        first = (await say(client, "a0"))[1]
        for number in range(MAX_WAITING + 10):
            assert (await say(client, f"x{number}", presence_penalty=1))[0] == 400
        client.headers["x-stainless-retry-count"] = "1"
        again = (await say(client, "a0"))[1]
        assert again["choices"] == first["choices"] and len(session._replies) == 1
