"""A request's own failure is that request's answer, and the engine goes on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import pytest
import torch
from letters import Letters
from tiny_policy import VOCAB_SIZE, make_request, serve

from penstock.compat.openai import OpenAI
from penstock.rollout.generator import EngineDead, GenerationFailed
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.runner import EngineRunner

PLAIN = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}}

SCORED = {"return_logprob": True, "logprob_start_len": 0}


async def lives(session: aiohttp.ClientSession) -> Any:
    """Return the greedy answer to a plain request, after the server has said that it is well."""
    async with session.get("/health") as response:
        assert response.status == 200, await response.text()
    async with session.post("/generate", json=PLAIN) as response:
        return (await response.json())["output_ids"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", SCORED | {"input_ids": [5], "sampling_params": {"max_new_tokens": 4}}),
        ("/generate", SCORED | {"input_ids": [5], "sampling_params": {"max_new_tokens": 0}}),
        ("/generate", SCORED | {"text": "A", "sampling_params": {"max_new_tokens": 4, "n": 3}}),
        ("/v1/completions", {"prompt": "A", "echo": True, "logprobs": 1, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [5], "echo": True, "logprobs": 1, "max_tokens": 0}),
    ],
)
async def test_scores_of_a_single_token_are_answered(runner: EngineRunner, path: str, body: dict[str, Any]) -> None:
    surfaces = [OpenAI(runner, Letters(), model_name="tiny")]
    async with (
        serve(runner, tokenizer=Letters(), foreign=surfaces) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=20)) as session,
    ):
        before = await lives(session)
        async with session.post(path, json=body) as response:
            assert response.status == 200, await response.text()
        assert await lives(session) == before


class Breaks(RuntimeError):
    """Raised by a part of a request's own work."""


class Panic(BaseException):
    """As a panic of a Rust library reaches Python."""


def broken(kind: type[BaseException]) -> Any:
    def raises(*_: object, **__: object) -> Any:
        raise kind("broken")

    return raises


@pytest.mark.parametrize("kind", [Breaks, Panic, MemoryError])
@pytest.mark.parametrize("place", ["ends", "scoring", "shaping", "top_logprobs"])
async def test_what_raises_for_one_request_fails_it_alone(
    runner: EngineRunner, place: str, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = make_request("a", [5, 6], params=SamplingParams(temperature=0.0, ignore_eos=True))
    (before,) = await runner.generate(greedy)
    params, ends = SamplingParams(temperature=0.0, ignore_eos=True), None
    match place:
        case "ends":
            ends = broken(kind)
        case "scoring":
            monkeypatch.setattr(runner.engine, "scoring", broken(kind))
        case "shaping":
            monkeypatch.setattr("penstock.rollout.sampling._shape_row", broken(kind))
            params = SamplingParams(temperature=0.0, ignore_eos=True, presence_penalty=1.0)
        case "top_logprobs":
            monkeypatch.setattr(torch.Tensor, "topk", broken(kind))
            params = SamplingParams(temperature=0.0, ignore_eos=True, top_logprobs=2)
    bad = GenerateRequest(rid="b", prompt_ids=[7], params=params, max_new_tokens=(8, 8), seeds=(0, 1), ends=ends)
    call = runner.score([5, 6]) if place == "scoring" else runner.generate(bad)
    beside = asyncio.create_task(runner.generate(make_request("c", [5, 6], params=greedy.params)))
    with pytest.raises(GenerationFailed, match="broken"):
        await call
    monkeypatch.undo()
    (neighbour,) = await beside
    (after,) = await runner.generate(greedy)
    assert before.token_ids == after.token_ids == neighbour.token_ids
    assert runner.error is None and runner.engine.num_active == runner.engine.num_waiting == 0


async def test_a_forward_that_fails_ends_the_engine(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.engine, "_logits", broken(Breaks))
    with pytest.raises(EngineDead, match="broken"):
        await runner.generate(make_request("a", [5]))


def odd(draw: random.Random) -> dict[str, Any]:
    """Return a body of `/generate` at the edges of what is served, or beyond them."""
    length = draw.choice([0, 1, 1, 2, 95, 96, 97])
    ids = [draw.choice([0, 1, 5, VOCAB_SIZE - 1, VOCAB_SIZE]) for _ in range(length)]
    sampling = {
        "n": draw.choice([1, 1, 2, 5, 1024, 1025]),
        "max_new_tokens": draw.choice([0, 1, 3, 95, 96]),
        "temperature": draw.choice([0, 1e-3, 1, 100, -1]),
        "top_p": draw.choice([1, 1e-300, 1e-6, 0.5, 0]),
        "top_k": draw.choice([-1, 1, 2**31 - 1, 0]),
        "min_p": draw.choice([None, 0, 1]),
        "min_new_tokens": draw.choice([None, 0, 3, 10**9, 10**30]),
        "stop_token_ids": draw.choice([None, [], [1], list(range(VOCAB_SIZE)), [-1]]),
        "stop": draw.choice([None, "A", ["BC", "A"], [5], ""]),
        "repetition_penalty": draw.choice([None, 0.01, 10]),
        "frequency_penalty": draw.choice([None, -2, 2]),
        "logit_bias": draw.choice([None, {}, {"5": -100}, {str(n): -100 for n in range(VOCAB_SIZE)}]),
        "sampling_seed": draw.choice([None, 0, -1, 2**64, -(2**80)]),
    }
    chosen = {name: sampling[name] for name in draw.sample(sorted(sampling), draw.randrange(6))}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": chosen}
    if draw.random() < 0.2:
        body = {"text": draw.choice(["", "A", "\x00", "A" * 96, "\ud7ff"]), "sampling_params": chosen}
    return body | {
        "return_logprob": draw.choice([True, False, None]),
        "logprob_start_len": draw.choice([-1, 0, 1, 95, 96, 10**30]),
        "top_logprobs_num": draw.choice([0, 1, 64, 65]),
        "return_text_in_logprobs": draw.choice([True, False]),
        "stream": draw.random() < 0.2,
    }


@pytest.mark.integration
async def test_any_mix_of_odd_requests_leaves_the_engine_as_it_was(runner: EngineRunner) -> None:
    draw = random.Random(20)
    bodies = iter([odd(draw) for _ in range(400)])
    async with (
        serve(runner, tokenizer=Letters()) as url,
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        before = await lives(session)

        async def send() -> None:
            for body in bodies:
                if draw.random() < 0.05:
                    body |= {"sampling_params": {"n": 4, "max_new_tokens": 90}}
                try:
                    async with session.post(
                        "/generate", json=body, timeout=aiohttp.ClientTimeout(total=20)
                    ) as response:
                        assert response.status in (200, 400), (response.status, await response.text(), body)
                        await response.read()
                except TimeoutError:
                    pass

        await asyncio.gather(*(send() for _ in range(8)))
        assert await lives(session) == before
        assert runner.engine.num_active == runner.engine.num_waiting == 0
