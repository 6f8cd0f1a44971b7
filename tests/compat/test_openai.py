"""The unmodified OpenAI SDK against our server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest
from letters import Letters
from tiny_policy import Held, make_engine, make_request, run, serve, until

from penstock.compat.openai import OpenAI
from penstock.rollout.app import ApiKeys
from penstock.rollout.request import SamplingParams
from penstock.rollout.runner import EngineRunner

EXACT = {"ignore_eos": True}


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20) as client:
        yield client


def greedy(prompt: str, count: int) -> list[int]:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    request = make_request("a", Letters().encode(prompt), max_new_tokens=count, params=params)
    return run(make_engine(), request)["a"][0].token_ids


async def test_models_are_listed_with_their_context(client: openai.AsyncOpenAI) -> None:
    (model,) = [model async for model in client.models.list()]
    assert (model.id, model.to_dict()["max_model_len"]) == ("tiny", 96)
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'huge' does not exist; this server serves 'tiny'"):
        await client.models.retrieve("huge")


async def test_a_completion_is_the_engines_answer(client: openai.AsyncOpenAI) -> None:
    done = await client.completions.create(
        model="tiny", prompt="HELLO", max_tokens=6, temperature=0, logprobs=2, extra_body=EXACT
    )
    (choice,) = done.choices
    ids = greedy("HELLO", 6)
    assert choice.text == Letters().decode(ids)
    assert choice.finish_reason == "length"
    assert choice.to_dict()["token_ids"] == ids
    assert choice.to_dict()["prompt_token_ids"] == Letters().encode("HELLO")
    assert choice.logprobs is not None and choice.logprobs.tokens == list(choice.text)
    assert choice.logprobs.text_offset == list(range(6))
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs or ())
    assert done.usage is not None and (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 6)
    assert done.system_fingerprint == "policy_version-0"
    assert done.to_dict()["metadata"] == {"weight_version": "0"}
    assert choice.to_dict()["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
    assert done.to_dict()["prompt_token_ids"] == Letters().encode("HELLO")


async def test_prompts_may_be_tokens_and_batches_have_a_choice_each(client: openai.AsyncOpenAI) -> None:
    ids = Letters().encode("HELLO")
    common = {"model": "tiny", "max_tokens": 4, "temperature": 0, "extra_body": EXACT}
    one = await client.completions.create(prompt=ids, **common)  # type: ignore[call-overload]
    assert one.choices[0].text == Letters().decode(greedy("HELLO", 4))
    several = await client.completions.create(prompt=["HELLO", "BYE"], n=2, **common)  # type: ignore[call-overload]
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices[2:]] == [Letters().decode(greedy("BYE", 4))] * 2
    assert several.usage.prompt_tokens == 8


async def test_echo_scores_the_prompt(client: openai.AsyncOpenAI) -> None:
    done = await client.completions.create(model="tiny", prompt="ABC", max_tokens=0, logprobs=0, echo=True)
    (choice,) = done.choices
    assert choice.text == "ABC" and choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None and choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])


async def test_a_conversation_goes_through_the_chat_template(client: openai.AsyncOpenAI) -> None:
    tool = {"type": "function", "function": {"name": "ADD", "parameters": {}}}
    done = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "BE"}, {"role": "user", "content": [{"type": "text", "text": "GOOD"}]}],
        max_completion_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        tools=[tool],  # type: ignore[list-item]
        extra_body=EXACT,
    )
    (choice,) = done.choices
    ids = greedy("ADD BE GOOD", 5)
    assert choice.message.role == "assistant" and choice.message.content == Letters().decode(ids)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [place.token for place in choice.logprobs.content] == list(choice.message.content)
    assert all(len(place.top_logprobs) == 3 for place in choice.logprobs.content)
    assert choice.to_dict()["token_ids"] == ids


async def test_tokens_are_the_authoritative_history(client: openai.AsyncOpenAI) -> None:
    done = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "ignored"}],
        max_tokens=3,
        temperature=0,
        extra_body=EXACT | {"prompt_token_ids": Letters().encode("HELLO")},
    )
    assert done.choices[0].message.content == Letters().decode(greedy("HELLO", 3))


async def test_n_choices_differ_and_follow_the_seed(client: openai.AsyncOpenAI) -> None:
    async def sample() -> list[str | None]:
        done = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "GO"}], n=4, seed=3, max_tokens=8, extra_body=EXACT
        )
        return [choice.message.content for choice in done.choices]

    first = await sample()
    assert len(set(first)) > 1 and first == await sample()


@pytest.mark.parametrize("stop", ["string", "strings", "token"])
async def test_answers_end_where_they_are_told_to(client: openai.AsyncOpenAI, stop: str) -> None:
    ids = greedy("HELLO", 12)
    text = Letters().decode(ids)
    asked = {"string": {"stop": text[4:6]}, "strings": {"stop": [text[4:6], "never"]}, "token": {"extra_body": {}}}[
        stop
    ]
    extra = EXACT | ({"stop_token_ids": [ids[4]]} if stop == "token" else {})
    done = await client.completions.create(  # type: ignore[call-overload]
        model="tiny", prompt="HELLO", max_tokens=12, temperature=0, **(asked | {"extra_body": extra})
    )
    (choice,) = done.choices
    end = text.find(text[4:6]) if stop != "token" else ids.index(ids[4])
    assert (choice.text, choice.finish_reason) == (text[:end], "stop")
    assert choice.to_dict()["matched_stop"] == (text[4:6] if stop != "token" else ids[4])


async def test_a_chat_stream_adds_up_to_the_whole(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "HELLO"}],
        max_tokens=6,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        extra_body=EXACT,
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.system_fingerprint for chunk in chunks if chunk.choices} == {"policy_version-0"}
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    ids = [token for chunk in chunks if chunk.choices for token in chunk.choices[0].to_dict()["token_ids"]]
    assert ids == greedy("HELLO", 6) and content == Letters().decode(ids)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 11


async def test_streamed_completions_of_several_prompts_keep_their_index(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny", prompt=["HELLO", "BYE"], max_tokens=5, temperature=0, stream=True, extra_body=EXACT
    )
    texts = {0: "", 1: ""}
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: Letters().decode(greedy("HELLO", 5)), 1: Letters().decode(greedy("BYE", 5))}


async def test_leaving_a_stream_ends_the_generation(
    client: openai.AsyncOpenAI, runner: EngineRunner, held: Held
) -> None:
    stream = await client.completions.create(model="tiny", prompt="A", max_tokens=90, stream=True, extra_body=EXACT)
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: not runner.engine.has_work)
    assert runner.engine.num_generated_tokens < 90


async def test_the_synchronous_client(url: str) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=20) as client:
            done = client.completions.create(
                model="tiny", prompt="HELLO", max_tokens=4, temperature=0, extra_body=EXACT
            )
            return done.choices[0].text

    assert await asyncio.to_thread(ask) == Letters().decode(greedy("HELLO", 4))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "`messages` is empty"),
        ({"messages": [{"role": "user", "content": "A"}], "n": 0}, "n must be from 1 to 1024"),
        ({"messages": [{"role": "user", "content": "A"}], "temperature": -1}, "temperature"),
        ({"messages": [{"role": "user", "content": "A"}], "max_tokens": 10**6}, "maximum context length is"),
        ({"messages": [{"role": "user", "content": "A"}], "max_tokens": -1}, "max_tokens must be at least 0"),
        ({"messages": [{"role": "user", "content": "A"}], "logprobs": True, "top_logprobs": 21}, "at most 20"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is served"),
        ({"messages": [{"role": "user", "content": "A"}], "response_format": {"type": "json_object"}}, "not served"),
        ({"messages": "A"}, "Expected `array`"),
        ({"messages": [{"role": "user", "content": 5}]}, "a `content` of text"),
        ({"messages": [{"content": "A"}]}, "a `role`"),
        ({"messages": [{"role": "user", "content": "REFUSE"}]}, "cannot be rendered: roles must alternate"),
        ({"messages": [{"role": "user", "content": "A"}], "tool_choice": "required"}, "`tool_choice`"),
        ({"messages": [{"role": "user", "content": "A"}], "separate_reasoning": False}, "`separate_reasoning` false"),
        ({"messages": [{"role": "user", "content": "A"}], "include_reasoning": False}, "`include_reasoning` false"),
        ({"messages": [{"role": "user", "content": "A"}], "guided_regex": "a+"}, "`guided_regex` is not served"),
        ({"messages": [{"role": "user", "content": "A"}], "allowed_token_ids": [0]}, "`allowed_token_ids` is not"),
        ({"messages": [{"role": "user", "content": "A"}], "bad_words": ["a"]}, "`bad_words` is not served"),
        ({"messages": [{"role": "user", "content": "A"}], "chat_template": "x"}, "the model's own is used"),
        ({"messages": [{"role": "user", "content": "A"}], "modalities": ["audio"]}, "`modalities` is not served but"),
        ({"messages": [{"role": "user", "content": "A"}], "max_completion_token": 3}, "`max_completion_tokens`?"),
        ({"messages": [{"role": "user", "content": "A"}], "truncate_prompt_tokens": 1}, "`truncate_prompt_tokens`"),
        ({"messages": [{"role": "user", "content": "A"}], "prompt_logprobs": 1}, "`prompt_logprobs` is not served"),
        ({"messages": [{"role": "user", "content": "A"}], "prompt_logprobs": 0}, "`prompt_logprobs` is not served"),
        ({"messages": [{"role": "user", "content": "A"}], "use_beam_search": True}, "`use_beam_search` is not served"),
        ({"messages": [{"role": "user", "content": "A"}], "return_tokens_as_token_ids": True}, "is not served"),
        (
            {"messages": [{"role": "user", "content": "A"}], "stream_options": {"continuous_usage_stats": True}},
            "`include_usage` tells the usage at the end",
        ),
        ({"messages": [{"role": "user", "content": "A"}], "functions": [{"name": "a"}]}, "give `tools`"),
        ({"messages": [{"role": "user", "content": "A"}], "function_call": {"name": "a"}}, "give `tools`"),
        ({"messages": [{"role": "user", "content": "A"}], "stop_regex": "a"}, "`stop_regex` is not served"),
        ({"messages": [{"role": "user", "content": "A"}], "lora_path": "a"}, "`lora_path` is not served"),
        ({"messages": [{"role": "user", "content": "A"}], "chat_template_kwargs": {"messages": []}}, "cannot set"),
        ({"messages": [], "prompt_token_ids": [99], "max_tokens": 1}, "outside the vocabulary"),
        ({}, "`messages` is empty: a chat needs them, or `prompt_token_ids`"),
    ],
)
async def test_what_cannot_be_served_is_refused_once_and_for_all(url: str, body: object, message: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        reply = await response.json()
    assert (response.status, response.headers["x-should-retry"]) == (400, "false")
    assert message in reply["error"]["message"] and reply["error"]["type"] == "invalid_request_error"


async def test_a_client_may_want_no_tokens(client: openai.AsyncOpenAI) -> None:
    without = {"return_token_ids": False, "chat_template_kwargs": None}
    done = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "A"}], max_tokens=2, extra_body=without
    )
    assert not {name for name in {**done.to_dict(), **done.choices[0].to_dict()} if "token_ids" in name}
    stream = await client.completions.create(model="tiny", prompt="A", max_tokens=2, stream=True, extra_body=without)
    async for chunk in stream:
        assert not {name for name in chunk.choices[0].to_dict() if "token_ids" in name}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "A" * 97, "max_tokens": 1}, "maximum context length is 96 tokens"),
        ({"prompt": "A" * 90, "max_tokens": 7}, "maximum context length is 96 tokens"),
        ({"prompt": "A" * 100_000, "max_tokens": 1}, "maximum context length is 96 tokens"),
    ],
)
async def test_a_long_prompt_is_refused_in_words_that_clients_know(url: str, body: object, message: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        error = (await response.json())["error"]
    assert response.status == 400 and message in error["message"] and error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 10**30])
async def test_a_seed_is_a_number_of_64_bits(client: openai.AsyncOpenAI, seed: int) -> None:
    with pytest.raises(openai.BadRequestError, match=r"seed|too large|out of range|Expected"):
        await client.completions.create(model="tiny", prompt="A", max_tokens=1, seed=seed)


async def test_text_becomes_tokens_and_back(url: str) -> None:
    ids, chat = Letters().encode("BE GOOD"), [{"role": "user", "content": "BE"}, {"role": "user", "content": "GOOD"}]
    refused: list[tuple[str, object]] = [
        ("tokenize", {}),
        ("tokenize", {"prompt": "A", "messages": chat}),
        ("tokenize", {"prompt": "A" * 100_000}),
        ("tokenize", {"prompt": "A", "add_special_tokens": True}),
        ("tokenize", {"messages": chat, "add_generation_prompt": False}),
        ("tokenize", {"messages": chat, "return_token_strs": True}),
        ("detokenize", {"tokens": [1] * 97}),
        ("detokenize", {"tokens": [-1]}),
        ("detokenize", {"tokens": [2**40]}),
    ]
    async with aiohttp.ClientSession(url) as session:
        for body in ({"prompt": "BE GOOD"}, {"messages": chat, "model": "tiny"}):
            async with session.post("/tokenize", json=body) as response:
                assert await response.json() == {"count": 7, "max_model_len": 96, "tokens": ids}
        async with session.post("/detokenize", json={"tokens": ids}) as response:
            assert await response.json() == {"prompt": Letters().decode(ids)}
        for path, body in refused:
            async with session.post(f"/{path}", json=body) as response:
                assert (response.status, (await response.json())["error"]["type"]) == (400, "invalid_request_error")


async def test_a_chat_may_be_given_in_tokens_alone(url: str) -> None:
    body = {"prompt_token_ids": Letters().encode("HELLO"), "max_tokens": 2}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert (await response.json())["choices"][0]["prompt_token_ids"] == Letters().encode("HELLO")


async def test_an_echo_has_the_likeliest_tokens_of_the_prompt(client: openai.AsyncOpenAI) -> None:
    done = await client.completions.create(model="tiny", prompt="HELLO", max_tokens=2, logprobs=2, echo=True)
    found = done.choices[0].logprobs
    assert found is not None and found.top_logprobs is not None and found.token_logprobs is not None
    assert found.top_logprobs[0] is None and found.token_logprobs[0] is None and len(found.top_logprobs) == 7
    for text, own, top in zip(found.tokens or (), found.token_logprobs, found.top_logprobs, strict=True):
        assert own is None or (top[text] == own and 2 <= len(top) <= 3)  # its own token may be none of the likeliest


async def test_no_likeliest_tokens_still_show_the_sampled_one(client: openai.AsyncOpenAI) -> None:
    done = await client.completions.create(model="tiny", prompt="A", max_tokens=3, logprobs=0)
    found = done.choices[0].logprobs
    assert found is not None and found.top_logprobs is not None
    assert [[*top] for top in found.top_logprobs] == [[text] for text in found.tokens or ()]


async def test_neutral_values_that_routers_add_ask_for_nothing(url: str) -> None:
    neutral: dict[str, object] = {"stop_regex": [], "bad_words": [], "lora_path": "", "allowed_token_ids": None}
    neutral |= {"truncate_prompt_tokens": 0, "prompt_logprobs": None, "regex": None, "guided_choice": []}
    chat = {"messages": [{"role": "user", "content": "A"}], "function_call": "none", "functions": [], **neutral}
    async with aiohttp.ClientSession(url) as session:
        for path, body in (("chat/completions", chat), ("completions", {"prompt": "A", **neutral})):
            async with session.post(f"/v1/{path}", json={**body, "max_tokens": 1}) as response:
                assert response.status == 200, await response.text()


async def test_only_a_model_can_be_no_model(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        for path, code in (("/v1/models/huge", "model_not_found"), ("/v1/nowhere", None)):
            async with session.get(path) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (404, code)


@pytest.mark.parametrize("prompt", [["A", 1], [1, "A", 2], [[1], 2], []])
async def test_prompts_of_several_kinds_are_refused(client: openai.AsyncOpenAI, prompt: list[object]) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt"):
        await client.completions.create(model="tiny", prompt=prompt, max_tokens=1)  # type: ignore[call-overload]


async def test_a_stream_ends_with_the_versions_and_shows_the_likeliest_tokens(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny", prompt="A", max_tokens=4, temperature=0, logprobs=2, stream=True, extra_body=EXACT
    )
    chunks = [chunk.choices[0].to_dict() async for chunk in stream]
    assert chunks[-1]["metadata"]["weight_version"] == "0"  # type: ignore[index]
    offsets = [offset for chunk in chunks if chunk["logprobs"] for offset in chunk["logprobs"]["text_offset"]]  # type: ignore[index,attr-defined]
    assert offsets == [0, 1, 2, 3]
    assert all(chunk["logprobs"] is None or chunk["logprobs"]["tokens"] for chunk in chunks)  # type: ignore[index]
    tops = [len(top) for chunk in chunks for top in (chunk["logprobs"] or {}).get("top_logprobs") or ()]  # type: ignore[attr-defined]
    assert tops == [2] * 4


async def test_a_client_that_leaves_ends_all_its_prompts(url: str, runner: EngineRunner, held: Held) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
            await client.completions.create(model="tiny", prompt=["A", "B"], max_tokens=90, extra_body=EXACT)

    await runner.pause("in_place")
    asking = asyncio.create_task(ask())
    await until(lambda: runner.engine.num_waiting == 2)
    await runner.continue_generation()
    await until(lambda: runner.engine.num_active == 2)
    asking.cancel()
    await until(lambda: not runner.engine.has_work)
    assert runner.engine.num_generated_tokens < 180


async def test_what_will_fail_again_is_not_to_be_repeated(runner: EngineRunner) -> None:
    surfaces = [OpenAI(runner, Letters(), model_name="tiny")]
    async with (
        serve(runner, tokenizer=Letters(), foreign=surfaces, keys=ApiKeys(generation="secret")) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="wrong", timeout=20) as stranger,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", timeout=20) as client,
    ):
        with pytest.raises(openai.AuthenticationError) as refused:
            await stranger.models.list()
        assert refused.value.code == "invalid_api_key"
        for call in (
            client.completions.create(model="tiny", prompt=[1] * 200),
            client.completions.create(model="tiny", prompt=[99]),
            client.get("/nowhere", cast_to=object),
            client.get("/completions", cast_to=object),
        ):
            with pytest.raises(openai.APIStatusError) as failed:
                await call
            assert failed.value.status_code in (400, 404, 405)
            assert failed.value.response.headers["x-should-retry"] == "false"


async def test_a_prompt_that_is_only_echoed_tells_who_scored_it(client: openai.AsyncOpenAI) -> None:
    done = await client.completions.with_raw_response.create(
        model="tiny", prompt="HELLO", max_tokens=0, echo=True, logprobs=1
    )
    assert done.headers["X-Policy-Version"] == "0"
    assert done.parse().system_fingerprint == "policy_version-0"
