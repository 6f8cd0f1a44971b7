"""Agents that call tools, with the unmodified OpenAI SDK: what the policy says is what they read, whole or streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_ports import leased
from openai import AsyncOpenAI
from scripted_policy import ScriptedPolicy
from test_gateway import Always, client_of, play
from tool_template import chat_with_tools

from penstock.config import Config
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Endpoint
from penstock.types import Sampling

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SETTINGS = Config.model_validate({"env": {"max_turns": 4, "max_new_tokens": 512}, "model": {"max_context": 2048}})
LONG: dict[str, Any] = {
    "settings": SETTINGS,
    "grants": Always(512),
    "job": leased(range(1), max_tokens=512, sampling=Sampling(max_new_tokens=512), deadline_s=20.0, env_seed=7),
}
ANSWERS = {
    "a call": CALL,
    "a call after text": f"I add them.\n{CALL}",
    "a call after thought": f"<think>two and three</think>\n\n{CALL}",
    "a call between texts, with spaces": f"\n\n I add them. \n{CALL}\n  That is all. ",
    "two calls": f"{CALL}\n{CALL.replace('2', '4')}",
    "text": "five < six, {5}",
    "thought and text": "<think>\nhm\n</think>\n\nfive",
    "a malformed call": '<tool_call>{"name": "add"',
    "an open thought": "<think>and so on",
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return chat_with_tools(tmp_path_factory.mktemp("model"))


def says(chat: ChatTokenizer, *texts: str) -> list[list[int]]:
    return [[*chat.encode_answer(text), chat.eos_ids[0]] for text in texts]


async def test_an_agent_calls_a_tool_and_answers(chat: ChatTokenizer) -> None:
    answers = says(chat, f"<think>sum</think>{CALL}", "5")
    policy = ScriptedPolicy(answers)

    async def agent(llm: Endpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": "2 + 3"}]
        async with client_of(llm) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(model=llm.model, messages=messages, tools=[ADD])  # type: ignore[list-item]
                (choice,) = reply.choices
                messages.append(choice.message)
                for call in choice.message.tool_calls or ():
                    assert call.type == "function" and call.function.name == "add"
                    assert choice.finish_reason == "tool_calls" and choice.message.content is None
                    numbers = json.loads(call.function.arguments)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(sum(numbers.values()))})
        return float(choice.message.content == "5" and choice.finish_reason == "stop")

    trajectory = await play(chat, policy, agent, **LONG)
    assert (trajectory.status, trajectory.reward, trajectory.error) == ("completed", 1.0, None)
    assert [part.token_ids for turn in trajectory.turns for part in turn.segments] == answers
    result = {"role": "tool", "content": "5"}
    assert trajectory.turns[1].observation_ids == chat.continuation([result], ended=True, tools=[ADD])
    first, last = trajectory.turns
    assert first.tools is not None and first.tools.finished_at is None and last.tools is None
    assert [call.name for call in first.tools.calls] == ["add"] and all(call.call_id for call in first.tools.calls)
    assert first.started_at <= first.answered_at <= first.tools.started_at <= last.started_at <= last.answered_at


@pytest.mark.parametrize(
    "changed",
    [
        {"index": 0},
        {"id": "other"},
        {"type": None},
        {"function": {"name": "add", "arguments": '{ "b":3,\n"a" : 2 }', "parsed_arguments": {"a": 2}}},
    ],
)
async def test_clients_send_calls_back_in_their_own_ways(chat: ChatTokenizer, changed: dict[str, Any]) -> None:
    async def agent(llm: Endpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": "2 + 3"}]
        async with client_of(llm) as client:
            reply = await client.chat.completions.create(model=llm.model, messages=messages, tools=[ADD])  # type: ignore[list-item]
            (call,) = reply.choices[0].message.to_dict()["tool_calls"]  # type: ignore[misc, attr-defined]
            sent = {name: value for name, value in {**call, **changed}.items() if value is not None}
            answer = {"role": "assistant", "content": None, "name": "me", "tool_calls": [sent], "parsed": {"a": 1}}
            messages += [answer, {"role": "tool", "tool_call_id": "x", "content": "5"}]
            await client.chat.completions.create(model=llm.model, messages=messages)
        return 1.0

    answers = says(chat, f"<think>sum</think>{CALL}", "5")
    trajectory = await play(chat, ScriptedPolicy(answers), agent, **LONG)
    assert trajectory.error is None and len(trajectory.turns) == 2


async def test_an_agent_may_leave_out_the_reasoning_that_it_read(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        async with client_of(llm) as client:
            reply = await client.chat.completions.create(model=llm.model, messages=messages)
            assert reply.choices[0].message.to_dict()["reasoning_content"] == "hm"
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": "b"})
            await client.chat.completions.create(model=llm.model, messages=messages)
        return 1.0

    answers = says(chat, "<think>hm</think>one", "<think>hm</think>two")
    trajectory = await play(chat, ScriptedPolicy(answers), agent, **LONG)
    assert trajectory.error is None and len(trajectory.turns) == 2


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("offers", [True, False])
async def test_a_streamed_answer_is_the_whole_one(chat: ChatTokenizer, name: str, offers: bool) -> None:
    found: list[dict[str, Any]] = []

    async def whole(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            found.append(await asked_whole(client, llm, offers))
        return 1.0

    async def streamed(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            found.append(await asked_in_a_stream(client, llm, offers))
        return 1.0

    for agent in (whole, streamed):
        answer = says(chat, ANSWERS[name])
        await play(chat, ScriptedPolicy(answer), agent, **LONG)
    assert found[0] == found[1]
    is_call = offers and "call" in name and "malformed" not in name
    assert bool(found[0]["tool_calls"]) == is_call
    assert found[0]["finish_reason"] == ("tool_calls" if is_call else "stop")
    if "thought" in name:
        assert found[0]["reasoning_content"]
    if not offers and "call" in name:
        assert CALL in found[0]["content"] or "malformed" in name


def request(llm: Endpoint, offers: bool) -> dict[str, Any]:
    tools = {"tools": [ADD]} if offers else {}
    return {"model": llm.model, "messages": [{"role": "user", "content": "2 + 3"}], **tools}


async def asked_whole(client: AsyncOpenAI, llm: Endpoint, offers: bool) -> dict[str, Any]:
    (choice,) = (await client.chat.completions.create(**request(llm, offers))).choices
    message = choice.message.to_dict()
    return {
        "content": message.get("content") or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "tool_calls": message.get("tool_calls", []),
        "finish_reason": choice.finish_reason,
    }


async def asked_in_a_stream(client: AsyncOpenAI, llm: Endpoint, offers: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": None}
    stream = await client.chat.completions.create(**request(llm, offers), stream=True)
    async for chunk in stream:
        (choice,) = chunk.choices
        delta = choice.delta.to_dict()
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):  # type: ignore[attr-defined]
            assert call.pop("index") == len(found["tool_calls"])
            found["tool_calls"].append(call)
        found["finish_reason"] = choice.finish_reason or found["finish_reason"]
    return found


async def test_one_call_at_a_time_if_the_agent_wants_so(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": "2 + 3"}]
        async with client_of(llm) as client:
            for _ in range(2):
                reply = await client.chat.completions.create(
                    model=llm.model,
                    messages=messages,
                    tools=[ADD],  # type: ignore[list-item]
                    parallel_tool_calls=False,
                )
                messages.append(reply.choices[0].message)
                for call in reply.choices[0].message.tool_calls or ():
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        assert [len(message.tool_calls or ()) for message in messages[1::2]] == [1, 0]
        return 1.0

    answers = says(chat, ANSWERS["two calls"], "5")
    trajectory = await play(chat, ScriptedPolicy(answers), agent, **LONG)
    assert trajectory.error is None and len(trajectory.turns) == 2
