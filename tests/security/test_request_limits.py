"""Each number, list and load of a request has a bound, and what exceeds it is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from letters import Letters
from tiny_policy import VOCAB_SIZE, make_request, serve

from penstock.compat.openai import OpenAI
from penstock.rollout import convert
from penstock.rollout import runner as runner_module
from penstock.rollout.generator import Overloaded
from penstock.rollout.runner import EngineRunner

MANY = {str(number): 1.0 for number in range(2000)}
SAMPLING: list[tuple[str, Any]] = [
    *(("top_p", value) for value in (0, -0.5, 1e-300, 9e-7, 1.1)),
    *(("n", value) for value in (0, -1, 1025, 2**63)),
    *(("temperature", value) for value in (-1, 1e-9, 1e300)),
    *(("top_k", value) for value in (2**31, 2**70)),
    *(("logit_bias", value) for value in (MANY, {"-1": 1}, {str(VOCAB_SIZE): 1}, {"1": 1e9})),
    *(("stop", value) for value in (["x"] * 17, "x" * 257, "")),
    *(("stop_token_ids", value) for value in ([*range(257)], [VOCAB_SIZE], [-1])),
    *(("max_new_tokens", value) for value in (-1, 10**9, 10**30)),
    ("min_new_tokens", -1),
    ("min_p", 2),
    ("frequency_penalty", 2.5),
    ("repetition_penalty", 0),
]


@pytest.mark.parametrize(("name", "value"), SAMPLING, ids=lambda value: f"{value!r:.40}")
async def test_a_value_beyond_its_bound_is_refused_by_name(runner: EngineRunner, name: str, value: Any) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2, name: value}}
    async with (
        serve(runner, tokenizer=Letters()) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/generate", json=body) as response,
    ):
        text = await response.text()
        assert response.status == 400, text[:300]
        names = (name, name.removeprefix("max_").replace("_", " "), "token id", "integer", "`int")
        assert any(each in text.lower() for each in names), text[:300]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_ids": [[1]] * 1025}, "1024"),
        ({"input_ids": [[1]] * 5, "sampling_params": {"n": 1000, "max_new_tokens": 1}}, "4096 samples"),
        ({"rid": "x" * 257}, "rid"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "2 times"),
        ({"text": ["A"] * 1025, "input_ids": None}, "1024"),
        ({"text": [], "input_ids": None}, "between 1 and 1024"),
    ],
)
async def test_a_batch_has_bounds(runner: EngineRunner, change: dict[str, Any], said: str) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}} | change
    async with (
        serve(runner, tokenizer=Letters()) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/generate", json=body) as response,
    ):
        assert response.status == 400 and said in await response.text(), await response.text()


SCORED = {"return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
COMPLETION = {"echo": True, "logprobs": 5}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/generate", SCORED | {"input_ids": [5], "sampling_params": {"n": 2, "max_new_tokens": 0}}, "`n` is 2"),
        ("/v1/completions", COMPLETION | {"prompt": [5], "n": 2, "max_tokens": 0}, "`n` is 2"),
        ("/generate", SCORED | {"input_ids": [5] * 21, "sampling_params": {"n": 5, "max_new_tokens": 1}}, "105 tokens"),
        ("/generate", SCORED | {"input_ids": [[5] * 51] * 2, "sampling_params": {"max_new_tokens": 0}}, "102 tokens"),
        ("/v1/completions", COMPLETION | {"prompt": [5] * 21, "n": 5, "max_tokens": 1}, "110 tokens"),
        ("/v1/completions", {"echo": True, "prompt": [5] * 21, "n": 5, "max_tokens": 1}, "105 tokens"),
        ("/v1/completions", {"logprobs": 1, "prompt": [5], "n": 11, "max_tokens": 10}, "110 tokens"),
    ],
)
async def test_what_the_samples_of_a_request_repeat_has_a_bound(
    runner: EngineRunner, path: str, body: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "MAX_REPEATED_TOKENS", 100)
    surfaces = [OpenAI(runner, Letters(), model_name="tiny")]
    async with (
        serve(runner, tokenizer=Letters(), foreign=surfaces) as url,
        aiohttp.ClientSession(url) as session,
        session.post(path, json=body) as response,
    ):
        text = await response.text()
        assert response.status == 400 and said in text, text[:300]


async def test_a_group_whose_sampled_tokens_are_recorded_has_no_such_bound(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "MAX_REPEATED_TOKENS", 1)
    body = {"input_ids": [5] * 20, "return_logprob": True, "sampling_params": {"n": 8, "max_new_tokens": 4}}
    async with (
        serve(runner, tokenizer=Letters()) as url,
        aiohttp.ClientSession(url) as session,
        session.post("/generate", json=body) as response,
    ):
        replies = await response.json()
        assert response.status == 200 and len(replies) == 8, replies


class Counting(Letters):
    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        self.num_decoded += 1
        return super().decode(token_ids, **options)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", SCORED | {"input_ids": [5] * 20, "sampling_params": {"n": 8, "max_new_tokens": 1}}),
        ("/v1/completions", COMPLETION | {"prompt": [5] * 20, "n": 8, "max_tokens": 1}),
    ],
)
async def test_the_tokens_of_a_prompt_are_decoded_once(runner: EngineRunner, path: str, body: dict[str, Any]) -> None:
    tokenizer = Counting()
    surfaces = [OpenAI(runner, tokenizer, model_name="tiny")]
    async with (
        serve(runner, tokenizer=tokenizer, foreign=surfaces) as url,
        aiohttp.ClientSession(url) as session,
        session.post(path, json=body) as response,
    ):
        assert response.status == 200, await response.text()
    assert tokenizer.num_decoded < 8 * 20


async def test_a_server_that_is_full_says_so_and_later_serves(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_OPEN_SAMPLES", 3)
    await runner.pause("in_place")
    waiting = [asyncio.create_task(runner.generate(make_request(f"a{n}", [5], max_new_tokens=2))) for n in range(3)]
    await asyncio.sleep(0)
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}
    async with serve(runner, tokenizer=Letters()) as url, aiohttp.ClientSession(url) as session:
        async with session.post("/generate", json=body) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "1"
            assert "3 samples" in await response.text()
        with pytest.raises(Overloaded):
            await runner.score([5, 6])
        await runner.continue_generation()
        await asyncio.gather(*waiting)
        async with session.post("/generate", json=body) as response:
            assert response.status == 200


async def test_the_tokens_of_all_prompts_have_a_bound(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_max_open_tokens", 10)
    await runner.generate(make_request("a", [5] * 10, max_new_tokens=1))
    with pytest.raises(Overloaded, match="at most 32768 with 10"):
        await runner.generate(make_request("b", [5] * 11, max_new_tokens=1))
    await runner.generate(make_request("c", [5] * 10, max_new_tokens=1))
