"""The same episode in three dialects, each with its official SDK: tools, reasoning, streams, limits and errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from scripted_policy import ScriptedPolicy
from test_gateway import client_of, play
from test_tool_calls import ADD, CALL, LONG, says
from tool_template import chat_with_tools

from penstock.config import Config
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Endpoint
from penstock.samples import Trajectory

PARAMETERS = ADD["function"]["parameters"]
FOR_CLAUDE: Any = {"name": "add", "description": "Add two numbers.", "input_schema": PARAMETERS}
FOR_RESPONSES: Any = {"type": "function", "name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}
SUM = f"<think>sum</think>I add.\n{CALL}"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return chat_with_tools(tmp_path_factory.mktemp("model"))


def claude_of(llm: Endpoint, **settings: Any) -> AsyncAnthropic:
    return AsyncAnthropic(base_url=llm.base_url, api_key="the address has it", max_retries=0, **settings)


async def with_chat_completions(llm: Endpoint) -> str:
    messages: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 3"}]
    async with client_of(llm) as client:
        while True:
            reply = await client.chat.completions.create(model=llm.model, messages=messages, tools=[ADD])  # type: ignore[list-item]
            message = reply.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for call in message.tool_calls:
                assert call.type == "function"
                total = sum(json.loads(call.function.arguments).values())
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})


async def with_responses(llm: Endpoint) -> str:
    items: list[Any] = [{"role": "user", "content": "2 + 3"}]
    async with client_of(llm) as client:
        while True:
            reply = await client.responses.create(
                model=llm.model, input=items, instructions="be brief", tools=[FOR_RESPONSES], store=False
            )
            items += reply.output
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                return reply.output_text
            assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
            assert reply.output_text == "I add."
            for call in calls:
                total = sum(json.loads(call.arguments).values())
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(total)})


async def with_streamed_responses(llm: Endpoint) -> str:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "2 + 3"}]}]
    async with client_of(llm) as client:
        while True:
            async with client.responses.stream(
                model=llm.model, input=items, instructions="be brief", tools=[FOR_RESPONSES]
            ) as stream:
                events = [event async for event in stream]
                reply = await stream.get_final_response()
            assert [event.sequence_number for event in events] == list(range(len(events)))
            items += [item.to_dict() for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
                assert said == reply.output_text
                return said
            for call in calls:
                total = sum(json.loads(call.arguments).values())
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(total)})


async def with_messages(llm: Endpoint) -> str:
    messages: list[Any] = [{"role": "user", "content": "2 + 3"}]
    async with claude_of(llm) as client:
        while True:
            reply = await client.messages.create(
                model=llm.model, max_tokens=512, system="be brief", messages=messages, tools=[FOR_CLAUDE]
            )
            messages.append({"role": "assistant", "content": reply.content})
            results = [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(sum(block.input.values()))}
                for block in reply.content
                if block.type == "tool_use"
            ]
            if not results:
                assert reply.stop_reason == "end_turn"
                return "".join(block.text for block in reply.content if block.type == "text")
            assert reply.stop_reason == "tool_use"
            assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
            messages.append({"role": "user", "content": results})


async def with_streamed_messages(llm: Endpoint) -> str:
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "2 + 3"}]}]
    system: Any = [{"type": "text", "text": "be brief"}]
    async with claude_of(llm) as client:
        while True:
            async with client.messages.stream(
                model=llm.model, max_tokens=512, system=system, messages=messages, tools=[FOR_CLAUDE]
            ) as stream:
                said = "".join([text async for text in stream.text_stream])
                reply = await stream.get_final_message()
            messages.append({"role": "assistant", "content": [block.to_dict() for block in reply.content]})
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "5"}]}
                for block in reply.content
                if block.type == "tool_use"
            ]
            if not results:
                return said
            assert said == "I add." and reply.stop_reason == "tool_use" and reply.usage.output_tokens > 0
            messages.append({"role": "user", "content": results})


AGENTS = [with_chat_completions, with_responses, with_streamed_responses, with_messages, with_streamed_messages]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
async def test_a_tool_agent_plays_the_same_episode_in_every_dialect(
    chat: ChatTokenizer, agent: Callable[[Endpoint], Awaitable[str]]
) -> None:
    async def plays(llm: Endpoint) -> float:
        return float(await agent(llm) == "it is 5")

    answers = says(chat, SUM, "it is 5")
    trajectory = await play(chat, ScriptedPolicy(answers), plays, **LONG)
    assert (trajectory.status, trajectory.reward, trajectory.error) == ("completed", 1.0, None)
    assert [turn.token_ids for turn in trajectory.turns] == answers
    assert len(trajectory.branches()) == 1, "the history is that of the recorded tokens"
    opening = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 3"}]
    assert trajectory.turns[0].observation_ids == chat.prompt(opening, tools=[ADD])


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_is_demanded_has_its_beginning_in_the_prompt(
    chat: ChatTokenizer, dialect: str, named: bool, stream: bool
) -> None:
    """The policy samples the rest, and only that is trained."""
    begun = '<tool_call>\n{"name": "' + ('add", "arguments":' if named else "")
    rest = CALL.removeprefix(begun)
    assert rest != CALL

    async def ask(llm: Endpoint) -> float:
        if dialect == "messages":
            async with claude_of(llm) as claude:
                choice: Any = {"type": "tool", "name": "add"} if named else {"type": "any"}
                asked: Any = {"tools": [FOR_CLAUDE], "tool_choice": choice, "max_tokens": 99, "model": "tiny"}
                asked["messages"] = [{"role": "user", "content": "2 + 3"}]
                if stream:
                    async with claude.messages.stream(**asked) as events:
                        message = await events.get_final_message()
                else:
                    message = await claude.messages.create(**asked)
                (block,) = message.content
                assert block.type == "tool_use"
                result = {"type": "tool_result", "tool_use_id": block.id, "content": "5"}
                asked["messages"] += [
                    {"role": "assistant", "content": message.content},
                    {"role": "user", "content": [result]},
                ]
                await claude.messages.create(**(asked | {"tool_choice": {"type": "auto"}}))
                return float(block.input == {"a": 2, "b": 3})
        async with client_of(llm) as client:
            if dialect == "responses":
                choice = {"type": "function", "name": "add"} if named else "required"
                asked = {"model": "tiny", "input": "2 + 3", "tools": [FOR_RESPONSES], "tool_choice": choice}
                if stream:
                    async with client.responses.stream(**asked) as told:
                        reply: Any = await (await anext_of(told)).get_final_response()
                else:
                    reply = await client.responses.create(**asked)
                (item,) = reply.output
                items = [{"role": "user", "content": "2 + 3"}, item.to_dict()]
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": "5"})
                await client.responses.create(model="tiny", input=items, tools=[FOR_RESPONSES])  # type: ignore[arg-type]
                return float(json.loads(item.arguments) == {"a": 2, "b": 3})
            messages: list[Any] = [{"role": "user", "content": "2 + 3"}]
            choice = {"type": "function", "function": {"name": "add"}} if named else "required"
            asked = {"model": "tiny", "messages": messages, "tools": [ADD], "tool_choice": choice}
            if stream:
                async with client.chat.completions.stream(**asked) as chunks:
                    reply = await (await anext_of(chunks)).get_final_completion()
            else:
                reply = await client.chat.completions.create(**asked)
            answer = reply.choices[0].message
            (call,) = answer.tool_calls
            assert answer.content in (None, "") and reply.choices[0].finish_reason == "tool_calls"
            said = {"role": "assistant", "content": None, "tool_calls": [call.to_dict()]}
            messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
            await client.chat.completions.create(model="tiny", messages=messages, tools=[ADD])  # type: ignore[list-item]
            return float(json.loads(call.function.arguments) == {"a": 2, "b": 3})

    trajectory = await play(chat, ScriptedPolicy(says(chat, rest, "5")), ask, **LONG)
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    first, second = trajectory.turns
    question = chat.prompt([{"role": "user", "content": "2 + 3"}], tools=[ADD])
    assert first.observation_ids == question + chat.encode(begun)
    assert (second.parent, chat.decode(first.token_ids)) == (0, rest)


async def test_a_demanded_call_ends_a_thought_that_the_prompt_begins(chat: ChatTokenizer) -> None:
    async def ask(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            reply = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "2 + 3"}],
                tools=[ADD],  # type: ignore[list-item]
                tool_choice="required",
                extra_body={"chat_template_kwargs": {"thinks": True}},
            )
        return float(len(reply.choices[0].message.tool_calls or ()) == 1)

    begun = '<tool_call>\n{"name": "'
    trajectory = await play(chat, ScriptedPolicy(says(chat, CALL.removeprefix(begun))), ask, **LONG)
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    assert chat.decode(trajectory.turns[0].observation_ids).endswith(f"<think>\n</think>\n\n{begun}")


async def anext_of(stream: Any) -> Any:
    """The stream, read to its end."""
    async for _ in stream:
        pass
    return stream


async def test_a_served_model_speaks_all_dialects(url: str) -> None:
    """A random policy: what it says is the same in each of them."""
    messages: Any = [{"role": "user", "content": "HELLO"}]
    root = f"{url}/v1"
    async with AsyncOpenAI(base_url=root, api_key="x") as client, AsyncAnthropic(base_url=url, api_key="x") as claude:
        exact = {"temperature": 0.0}
        said = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0.0)
        text = said.choices[0].message.content
        reply = await client.responses.create(model="tiny", input="HELLO", max_output_tokens=6, temperature=0.0)
        assert (reply.output_text, reply.usage and reply.usage.output_tokens) == (text, 6)
        async with client.responses.stream(model="tiny", input="HELLO", max_output_tokens=6, temperature=0.0) as events:
            told = "".join([event.delta async for event in events if event.type == "response.output_text.delta"])
        message = await claude.messages.create(model="tiny", max_tokens=6, messages=messages, extra_body=exact)
        async with claude.messages.stream(model="tiny", max_tokens=6, messages=messages, extra_body=exact) as stream:
            streamed = "".join([part async for part in stream.text_stream])
        assert [told, *(block.text for block in message.content if block.type == "text"), streamed] == [text] * 3
        assert message.stop_reason == "max_tokens"
        with pytest.raises(anthropic.BadRequestError, match="maximum context length is"):
            await claude.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": "A" * 5000}])
        with pytest.raises(anthropic.BadRequestError, match="max_tokens: field required"):
            await claude.post("/v1/messages", cast_to=object, body={"model": "tiny", "messages": messages})


async def tried(
    chat: ChatTokenizer, ask: Callable[[Endpoint], Awaitable[Any]], *answers: str, treatment: str = "count"
) -> Trajectory:
    asked: list[Endpoint] = []

    async def agent(llm: Endpoint) -> float:
        await ask(llm)
        asked.append(llm)
        return 1.0

    tree = {"env": {"max_turns": 4, "max_new_tokens": 64, "refused_requests": treatment}, "model": {"max_context": 96}}
    policy = ScriptedPolicy(says(chat, *answers))
    trajectory = await play(chat, policy, agent, settings=Config.model_validate(tree))
    assert asked, f"not all of it went well: {trajectory.error}"
    return trajectory


@pytest.mark.parametrize("stream", [False, True])
async def test_limits_and_stops_have_the_dialects_own_names(chat: ChatTokenizer, stream: bool) -> None:
    async def ask(llm: Endpoint) -> None:
        async with claude_of(llm) as claude, client_of(llm) as client:
            for number, (words, reason, sequence) in enumerate(
                [({"max_tokens": 2}, "max_tokens", None), ({"stop_sequences": ["lo"]}, "stop_sequence", "lo")]
            ):
                asked: Any = {"max_tokens": 60, **words, "messages": [{"role": "user", "content": f"{number}"}]}
                if stream:
                    async with claude.messages.stream(model="tiny", **asked) as events:
                        message = await events.get_final_message()
                else:
                    message = await claude.messages.create(model="tiny", **asked)
                assert (message.stop_reason, message.stop_sequence) == (reason, sequence)
            reply: Any = await client.responses.create(
                model="tiny", input="b", max_output_tokens=2, stream=stream, metadata={"a": "b"}
            )
            if stream:
                events = [event async for event in reply]
                assert events[-1].type == "response.incomplete"
                reply = events[-1].response
            assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert (reply.output_text, reply.usage.output_tokens, reply.metadata) == ("he", 2, {"a": "b"})

    trajectory = await tried(chat, ask, "hello", "hello", "hello")
    assert trajectory.error is None and len(trajectory.turns) == 3


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("messages", {"tool_choice": {"type": "some"}}, "tool_choice: {'type': 'some'} is none of 'auto', 'any', 'none'"),
    ("messages", {"tool_choice": {"type": "any"}}, "asks for a call of a tool, and `tools` does not have it"),
    ("messages", {"tool_choice": {"type": "tool", "name": "x"}, "tools": [FOR_CLAUDE]}, "asks for a call of 'x'"),
    ("messages", {"messages": [{"role": "system", "content": "x"}]}, "messages.0.role: 'system' is neither"),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages.0.content.0.type: 'image' is not served in a message of the user",
    ),
    (
        "messages",
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "5"}]}]},
        "messages.0.content.0.tool_use_id: field required",
    ),
    (
        "messages",
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 5}]}]},
        "messages.0.content.0: a tool use has an `id`, a `name` and an `input`",
    ),
    ("messages", {"tools": [{"name": "add"}]}, "tools.0: a tool has a `name` and an `input_schema`"),
    ("messages", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "this server runs no tools"),
    ("messages", {"messages": [{"role": "user", "content": "x" * 5000}]}, "maximum context length is"),
    ("messages", {"extra_body": {"temperature": "hot"}}, "temperature"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id: not served; give the whole"),
    ("responses", {"tool_choice": "required"}, "asks for a call of a tool, and `tools` does not have it"),
    ("responses", {"tool_choice": {"type": "web_search"}}, "`tool_choice` is `auto`, `none`, `required` or a named"),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format: {'type': 'json_object'} is not served"),
    ("responses", {"text": {"format": 5}}, "text.format: 5 is not served"),
    ("responses", {"extra_body": {"metadata": {"a": {"b": 1}}}}, "metadata"),
    ("messages", {"tool_choice": {"type": "x" * 5000}}, "tool_choice: {'type': 'x{80,100} is none of"),
    ("responses", {"tools": [{"type": "web_search"}]}, r"tools\[0\].type: 'web_search' is not served"),
    ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type: 'item_reference'"),
    ("responses", {"input": [{"role": "judge", "content": "x"}]}, r"input\[0\].role: 'judge' is none of"),
    ("responses", {"input": [{"type": "function_call", "name": "a"}]}, r"input\[0\]: a function call has a `call_id`"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content: only"),
    ("responses", {"input": "x" * 5000}, "maximum context length is"),
]


@pytest.mark.parametrize(("dialect", "asked", "reason"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_served_is_refused_in_the_dialects_own_shape(
    chat: ChatTokenizer, dialect: str, asked: dict[str, Any], reason: str, stream: bool
) -> None:
    async def ask(llm: Endpoint) -> None:
        if dialect == "messages":
            words: Any = {"max_tokens": 8, "messages": [{"role": "user", "content": "a"}], **asked}
            async with claude_of(llm) as claude:
                with pytest.raises(anthropic.BadRequestError, match=reason) as caught:
                    await claude.messages.create(model="tiny", stream=stream, **words)
            assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
            return
        async with client_of(llm) as client:
            with pytest.raises(openai.BadRequestError, match=reason) as refused:
                await client.responses.create(**{"model": "tiny", "input": "a", "stream": stream, **asked})
        assert refused.value.type == "invalid_request_error"

    trajectory = await tried(chat, ask, treatment="fail")
    assert trajectory.status == "failed", "a refused request is told"


async def test_an_error_in_a_stream_is_an_event_of_the_dialect(chat: ChatTokenizer) -> None:
    """The episode has no turn left when the second request comes."""

    async def ask(llm: Endpoint) -> None:
        async with claude_of(llm) as claude, client_of(llm, max_retries=0) as client:
            for number in range(4):
                await claude.messages.create(
                    model="tiny", max_tokens=8, messages=[{"role": "user", "content": f"{number}"}]
                )
            with pytest.raises(anthropic.APIStatusError, match="used its 4 turns"):
                async with claude.messages.stream(
                    model="tiny", max_tokens=8, messages=[{"role": "user", "content": "x"}]
                ) as events:
                    await events.get_final_message()
            stream = await client.responses.create(model="tiny", input="x", stream=True)
            *_, told, failed = [event async for event in stream]
            assert told.type == "error" and "used its 4 turns" in told.message
            assert failed.type == "response.failed" and failed.response.status == "failed"
            assert failed.response.error and "used its 4 turns" in failed.response.error.message

    trajectory = await tried(chat, ask, *"abcd", treatment="fail")
    assert trajectory.error is None and trajectory.stop_reason == "max_turns"


async def test_tokens_are_counted_and_cost_no_turn(chat: ChatTokenizer) -> None:
    async def ask(llm: Endpoint) -> None:
        root = llm.base_url.removesuffix("/v1")
        async with AsyncAnthropic(base_url=root, api_key="x") as claude:
            found = await claude.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": "abc"}])
            assert found.input_tokens == len(chat.prompt([{"role": "user", "content": "abc"}]))
            reply = await claude.messages.create(
                model="tiny", max_tokens=8, messages=[{"role": "user", "content": "abc"}]
            )
            assert reply.usage.input_tokens == found.input_tokens

    trajectory = await tried(chat, ask, "a")
    assert trajectory.error is None and len(trajectory.turns) == 1


async def test_the_key_of_an_episode_may_come_in_anthropics_header(chat: ChatTokenizer) -> None:
    async def ask(llm: Endpoint) -> None:
        shared = llm.base_url.partition("/s/")[0]
        async with AsyncAnthropic(base_url=shared, api_key=llm.api_key) as claude:
            await claude.messages.create(model="tiny", max_tokens=8, messages=[{"role": "user", "content": "a"}])
        async with AsyncAnthropic(base_url=shared, api_key="guessed", max_retries=0) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(model="tiny", max_tokens=8, messages=[{"role": "user", "content": "a"}])
        async with AsyncOpenAI(base_url=f"{shared}/v1", api_key=llm.api_key) as client:
            assert (await client.responses.create(model="tiny", input="b")).output_text == "b"

    trajectory = await tried(chat, ask, "a", "b")
    assert trajectory.error is None and len(trajectory.turns) == 2
