"""The HTTP surface on a real socket: SGLang's shapes, identity, the weights transaction, bad input."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest
from tiny_policy import (
    Held,
    generate_greedily,
    make_engine,
    make_handle,
    make_request,
    print_of,
    receive_seed,
    reference_model,
    run,
    serve,
    until,
)

from penstock.rollout.app import ApiKeys
from penstock.rollout.generator import Conflict
from penstock.rollout.runner import EngineRunner
from penstock.rollout.update import WeightsUpdate
from penstock.types import NO_VERSION
from penstock.weights.shared_memory import fingerprint


class Http:
    """Raw calls."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes | io.BytesIO) else json.dumps(body)
        async with self.session.post(path, data=data, **options) as response:
            return response.status, json.loads(await response.read())

    async def stream(self, path: str, body: Any, *, events: int | None = None) -> list[Any]:
        """The server-sent events, all of them or the first few."""
        found: list[Any] = []
        async with self.session.post(path, data=json.dumps(body)) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            async for line in response.content:
                if line.startswith(b"data: ") and line != b"data: [DONE]\n":
                    found.append(json.loads(line[6:]))
                if len(found) == events:
                    return found
        assert line == b"\n", "the last event is complete"
        return found

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(path, **options) as response:
            return response.status, json.loads(await response.read())


@pytest.fixture
async def http(url: str) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield Http(session)


def greedy(max_new_tokens: int = 4, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True, **more}


async def test_greedy_answers_are_those_of_transformers(http: Http) -> None:
    prompts = [[5, 6], [7], list(range(2, 40)), [5, 6]]
    sampling = {"max_new_tokens": 20, "temperature": 0}
    status, replies = await http.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    assert status == 200
    model = reference_model(0)
    assert [reply["output_ids"] for reply in replies] == [generate_greedily(model, prompt, 20) for prompt in prompts]


async def test_generate_answers_in_the_shape_of_sglang(http: Http) -> None:
    body = {"input_ids": [5, 6], "rid": "mine", "return_logprob": True, "sampling_params": greedy(), "background": None}
    status, reply = await http.post("/generate", body)
    assert status == 200
    meta = reply["meta_info"]
    ids = reply["output_ids"]
    assert len(ids) == 4
    assert meta.pop("e2e_latency") > 0
    logprobs = meta.pop("output_token_logprobs")
    assert [triple[1:] for triple in logprobs] == [[token, None] for token in ids]
    assert all(triple[0] < 0 for triple in logprobs)
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "input_token_logprobs": None,
        "input_top_logprobs": None,
        "output_top_logprobs": None,
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": 4}],
    }


async def test_several_samples_come_as_a_list(http: Http) -> None:
    sampling = {"n": 3, "max_new_tokens": [2, 3, 4], "sampling_seed": [7, 8, 9], "ignore_eos": True}
    status, replies = await http.post("/generate", {"input_ids": [5], "sampling_params": sampling})
    assert status == 200
    expected = run(make_engine(), make_request("a", [5], max_new_tokens=(2, 3, 4), seeds=(7, 8, 9)))["a"]
    assert [reply["output_ids"] for reply in replies] == [segment.token_ids for segment in expected]
    assert (
        "output_token_logprobs" not in replies[0]["meta_info"] or not replies[0]["meta_info"]["output_token_logprobs"]
    )


class Letters:
    """A tokenizer: one token per character."""

    longest_token = 1

    def encode(self, text: str) -> list[int]:
        return [ord(character) - ord("@") for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(chr(ord("@") + token) for token in token_ids)


async def test_text_goes_in_and_out_through_the_tokenizer(runner: EngineRunner) -> None:
    async with serve(runner, tokenizer=Letters()) as url, aiohttp.ClientSession(url) as session:
        http = Http(session)
        _, of_text = await http.post("/generate", {"text": "ABC", "sampling_params": greedy()})
        body = {"input_ids": [1, 2, 3], "sampling_params": greedy(), "return_text": False}
        _, of_ids = await http.post("/generate", body)
    assert of_text["output_ids"] == of_ids["output_ids"]
    assert (of_text["text"], of_ids["text"]) == (Letters().decode(of_ids["output_ids"]), "")


@pytest.fixture
async def spoken(runner: EngineRunner) -> AsyncIterator[Http]:
    """A server with a tokenizer."""
    async with serve(runner, tokenizer=Letters()) as url, aiohttp.ClientSession(url) as session:
        yield Http(session)


async def test_a_batch_is_a_list_in_order(spoken: Http) -> None:
    singles = [
        (await spoken.post("/generate", {"input_ids": [token], "sampling_params": greedy()}))[1] for token in (5, 6)
    ]
    body = {"input_ids": [[5], [6]], "rid": "b", "sampling_params": greedy()}
    status, replies = await spoken.post("/generate", body)
    assert status == 200
    assert [reply["output_ids"] for reply in replies] == [single["output_ids"] for single in singles]
    assert [reply["meta_info"]["id"] for reply in replies] == ["b_0", "b_1"]
    body = {"text": ["A", "B"], "sampling_params": [greedy(1), greedy(2, n=2)]}
    _, replies = await spoken.post("/generate", body)
    assert [len(reply["output_ids"]) for reply in replies] == [1, 2, 2]
    _, replies = await spoken.post("/generate", {"text": ["A"], "sampling_params": greedy(1)})
    assert len(replies) == 1


async def test_a_batch_with_one_bad_prompt_is_refused_as_a_whole(spoken: Http, runner: EngineRunner) -> None:
    status, reply = await spoken.post("/generate", {"input_ids": [[5], [99]], "sampling_params": greedy()})
    assert (status, "outside the vocabulary" in reply["error"]["message"]) == (400, True)
    assert runner.engine.num_generated_tokens == 0


async def test_answers_end_at_a_stop_string_which_is_cut(spoken: Http) -> None:
    _, free = await spoken.post("/generate", {"text": "AB", "sampling_params": greedy(40)})
    stop = free["text"][3:6]
    first = free["text"].find(stop)
    _, cut = await spoken.post("/generate", {"text": "AB", "sampling_params": greedy(40, stop=[stop, "never!"])})
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert (cut["text"], cut["output_ids"]) == (free["text"][:first], free["output_ids"][: first + 3])
    sampling = greedy(40, stop=stop, no_stop_trim=True)
    assert (await spoken.post("/generate", {"text": "AB", "sampling_params": sampling}))[1]["text"] == cut[
        "text"
    ] + stop


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
async def test_a_stop_token_is_not_part_of_the_text(spoken: Http, name: str) -> None:
    _, free = await spoken.post("/generate", {"text": "AB", "sampling_params": greedy()})
    token = free["output_ids"][-1]
    _, reply = await spoken.post("/generate", {"text": "AB", "sampling_params": greedy(**{name: [token]})})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
    assert reply["output_ids"][-1] == token
    assert reply["text"] == Letters().decode(reply["output_ids"][:-1])


async def test_prompts_are_scored_with_nothing_generated(spoken: Http) -> None:
    body = {"text": "ABC", "return_logprob": True, "logprob_start_len": 0, "return_text_in_logprobs": True}
    _, reply = await spoken.post("/generate", {**body, "sampling_params": {"max_new_tokens": 0}})
    triples = reply["meta_info"]["input_token_logprobs"]
    assert [triple[1:] for triple in triples] == [[1, "A"], [2, "B"], [3, "C"]]
    assert triples[0][0] is None and all(triple[0] < 0 for triple in triples[1:])
    assert (reply["output_ids"], reply["meta_info"]["finish_reason"]) == ([], {"type": "length", "length": 0})
    _, later = await spoken.post("/generate", {**body, "logprob_start_len": 2, "sampling_params": greedy()})
    assert later["meta_info"]["input_token_logprobs"] == triples[2:]
    assert len(later["output_ids"]) == 4


async def test_versions_are_in_a_header_too(spoken: Http, runner: EngineRunner, held: Held) -> None:
    async def header(body: dict[str, Any]) -> str | None:
        async with spoken.session.post("/generate", json=body) as response:
            return response.headers.get("X-Policy-Version")

    assert await header({"text": "ABC", "sampling_params": greedy()}) == "0"
    running = asyncio.create_task(header({"text": "ABC", "sampling_params": greedy(80)}))
    await until(lambda: runner.engine.num_generated_tokens > 8)
    await spoken.post("/weights/begin", weights_handle(1))
    await spoken.post("/weights/commit", {"policy_version": 1})
    held.let_go.set()
    assert await running == "0-1"


async def test_scores_tell_who_computed_them(spoken: Http) -> None:
    scored = {"text": "ABC", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 0}}
    async with spoken.session.post("/generate", json=scored) as response:
        reply = await response.json()
        assert (response.headers["X-Policy-Version"], reply["meta_info"]["weight_version"]) == ("0", "0")


async def test_the_likeliest_tokens_are_told(spoken: Http) -> None:
    body = {"text": "A", "return_logprob": True, "top_logprobs_num": 2, "sampling_params": greedy()}
    meta = (await spoken.post("/generate", body))[1]["meta_info"]
    assert [place[0] for place in meta["output_top_logprobs"]] == meta["output_token_logprobs"]
    assert [len(place) for place in meta["output_top_logprobs"]] == [2] * 4


async def test_the_likeliest_tokens_of_a_prompt_are_told(spoken: Http) -> None:
    """What the engine would have said, and of the first token nothing."""
    prompt = Letters().encode("AB") + run(make_engine(), make_request("a", Letters().encode("AB")))["a"][0].token_ids
    scored = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    body = {"input_ids": prompt, **scored, "sampling_params": {"max_new_tokens": 0}}
    meta = (await spoken.post("/generate", body))[1]["meta_info"]
    first, *tops = meta["input_top_logprobs"]
    assert first is None and len(tops) == len(prompt) - 1
    assert all(len(place) == 2 and place[0][0] >= place[1][0] for place in tops)
    for (logprob, token, _), place in zip(meta["input_token_logprobs"][1:], tops, strict=True):
        assert logprob <= place[0][0] + 1e-5 and (token != place[0][1] or logprob == pytest.approx(place[0][0]))


async def test_a_stream_grows_and_ends_with_the_whole_reply(spoken: Http) -> None:
    body = {"text": "AB", "return_logprob": True, "sampling_params": greedy(12)}
    _, whole = await spoken.post("/generate", body)
    events = await spoken.stream("/generate", body | {"stream": True})
    assert [event["text"] for event in events[:-1]] == [whole["text"][:length] for length in range(1, 13)]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * 12
    stamped = [[{"version": "0", "start": 0, "end": length}] for length in range(1, 13)]
    assert [event["meta_info"]["weight_versions"] for event in events[:-1]] == stamped
    for reply in (whole, events[-1]):
        for changing in ("e2e_latency", "id"):
            del reply["meta_info"][changing]
    assert events[-1] == whole


async def test_every_event_of_a_stream_tells_which_weights_made_what(
    spoken: Http, runner: EngineRunner, held: Held
) -> None:
    body = {"text": "AB", "stream": True, "sampling_params": greedy(80)}
    running = asyncio.create_task(spoken.stream("/generate", body))
    await until(lambda: runner.engine.num_generated_tokens > 8)
    await spoken.post("/weights/begin", weights_handle(1))
    await spoken.post("/weights/commit", {"policy_version": 1})
    held.let_go.set()
    events = await running
    old, new = events[-1]["meta_info"]["weight_versions"]
    for event in events[:-1]:
        length, meta = len(event["output_ids"]), event["meta_info"]
        spans = [old | {"end": min(old["end"], length)}] + ([new | {"end": length}] if length > old["end"] else [])
        assert (meta["weight_versions"], meta["weight_version"]) == (spans, spans[-1]["version"])


async def test_several_samples_stream_under_their_index(spoken: Http) -> None:
    sampling = {"n": 2, "max_new_tokens": [3, 5], "sampling_seed": [1, 2], "ignore_eos": True}
    _, whole = await spoken.post("/generate", {"text": "AB", "sampling_params": sampling})
    events = await spoken.stream("/generate", {"text": "AB", "stream": True, "sampling_params": sampling})
    last = {event["index"]: event["text"] for event in events if event["meta_info"]["finish_reason"]}
    assert last == {index: reply["text"] for index, reply in enumerate(whole)}


async def test_a_stream_never_shows_what_a_stop_string_takes_back(spoken: Http) -> None:
    _, free = await spoken.post("/generate", {"text": "AB", "sampling_params": greedy(40)})
    stop = free["text"][3:6]
    body = {"text": "AB", "stream": True, "sampling_params": greedy(40, stop=stop)}
    texts = [event["text"] for event in await spoken.stream("/generate", body)]
    assert all(texts[-1].startswith(text) for text in texts)
    assert texts[-1] == free["text"][: free["text"].find(stop)]


async def test_a_stream_never_shows_a_stop_token(spoken: Http) -> None:
    _, free = await spoken.post("/generate", {"text": "AB", "sampling_params": greedy(12)})
    body = {"text": "AB", "stream": True, "sampling_params": greedy(12, stop_token_ids=[free["output_ids"][6]])}
    texts = [event["text"] for event in await spoken.stream("/generate", body)]
    assert all(texts[-1].startswith(text) for text in texts)


async def test_leaving_a_stream_frees_its_slots(spoken: Http, runner: EngineRunner, held: Held) -> None:
    body = {"text": "AB", "stream": True, "sampling_params": greedy(90)}
    await spoken.stream("/generate", body, events=2)
    await until(lambda: not runner.engine.has_work)
    assert runner.engine.num_generated_tokens < 90


async def test_stop_tokens_are_reported_as_matched(http: Http) -> None:
    _, free = await http.post("/generate", {"input_ids": [5], "sampling_params": greedy()})
    stop = free["output_ids"][0]
    _, reply = await http.post("/generate", {"input_ids": [5], "sampling_params": greedy(stop_token_ids=[stop])})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


BAD_BODIES: list[tuple[Any, str]] = [
    (b"", "truncated"),
    (b"{", "truncated"),
    (b"\xff\xfe", "malformed"),
    (b'{"x":' + b"[" * 100_000, "nested too deeply"),
    ([], "Expected `object`"),
    ({}, "exactly one of"),
    ({"input_ids": [1], "text": "a"}, "exactly one of"),
    ({"text": "a"}, "no tokenizer"),
    ({"input_ids": "abc"}, "Expected `array | null`"),
    ({"input_ids": [1, "a"]}, "Expected `int | array`"),
    ({"input_ids": [[1], 2]}, "mixes token ids and lists"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}]}, "`sampling_params` has 1 values for 2 prompts"),
    ({"input_ids": [1], "sampling_params": [{}]}, "`sampling_params` is a list, but"),
    ({"input_ids": [1.5]}, "Expected `int | array`"),
    ({"input_ids": [10**30], "sampling_params": {"max_new_tokens": 1}}, "outside the vocabulary"),
    ({"input_ids": []}, "prompt is empty"),
    ({"input_ids": [-1], "sampling_params": {"max_new_tokens": 1}}, "outside the vocabulary"),
    ({"input_ids": [64], "sampling_params": {"max_new_tokens": 1}}, "outside the vocabulary"),
    ({"input_ids": [1] * 5000}, "maximum context length is"),
    ({"input_ids": [99], "stream": True}, "outside the vocabulary"),
    ({"input_ids": [99], "sampling_params": {"max_new_tokens": 0}}, "outside the vocabulary"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": -5}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "x"}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 10**12}}, "maximum context length is"),
    ({"input_ids": [1], "sampling_params": {"n": 0}}, "n`"),
    ({"input_ids": [1], "sampling_params": {"n": 10**9}}, "n`"),
    ({"input_ids": [1], "sampling_params": {"n": 2, "sampling_seed": [1]}}, "sampling_seed"),
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"input_ids": [1], "sampling_params": {"top_k": 10**15}}, "top_k"),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": list(range(1000))}}, "stop_token_ids"),
    ({"input_ids": [1], "sampling_params": {"stop": ["x"]}}, "no tokenizer: set `stop` to token ids"),
    ({"input_ids": [1], "sampling_params": {"stop": [""]}}, "`stop` contains an empty string"),
    ({"input_ids": [1], "sampling_params": {"stop": ["x"] * 17}}, "at most 16 strings"),
    ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "request a is in the batch 2 times"),
    ({"input_ids": [1], "sampling_params": {"min_p": 1.5}}, "min_p"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "logit_bias": {"64": 1.0}}}, "outside the vocabulary"),
    (
        {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 65, "sampling_params": {"max_new_tokens": 1}},
        "top_logprobs must be between 0 and 64",
    ),
    ({"input_ids": [1], "sampling_params": {"json_schema": "{}"}}, "`json_schema` is not supported"),
    ({"input_ids": [1], "sampling_params": {"stop_regex": ["a"]}}, "`stop_regex` is not supported"),
    ({"input_ids": [1], "lora_path": "adapter"}, "`lora_path` is not supported"),
    ({"input_ids": [[1], [2]], "lora_path": [None, "adapter"]}, "`lora_path` is not supported"),
    ({"input_ids": [1], "input_embeds": [[0.0]]}, "`input_embeds` is not supported"),
    ({"input_ids": [1], "image_data": "x"}, "`image_data` is not supported"),
    ({"input_ids": [1], "session_params": {"id": "a"}}, "`session_params` is not supported"),
    ({"input_ids": [1], "token_ids_logprob": [0]}, "`token_ids_logprob` is not supported"),
    ({"input_ids": [1], "return_hidden_states": True}, "`return_hidden_states` is not supported"),
    ({"input_ids": [1], "custom_logit_processor": "x"}, "`custom_logit_processor` is not supported"),
    ({"input_ids": [1], "sampling_parms": {"n": 2}}, "unknown field `sampling_parms`: did you mean `sampling_params`?"),
    ({"input_ids": [1], "sampling_params": {"max_new_token": 3}}, "unknown field `max_new_token`"),
    ({"input_ids": [1], "sampling_params": {"max_new_token": 3}}, "did you mean `max_new_tokens`?"),
    ({"input_ids": [[1], [2]], "sampling_params": [{}, {"xyzzy": 3}]}, "unknown field `xyzzy`"),
    ({"input_ids": [1], "sampling_params": {"custom_params": {"a": 1}}}, "`custom_params` is not supported"),
]


async def test_any_number_of_unknown_fields_is_passed_over(http: Http) -> None:
    unknown = {f"sampling_{number}": 1 for number in range(20_000)} | {"x" * 100_000: 1}
    async with asyncio.timeout(5):
        status, _ = await http.post("/generate", {**unknown, "input_ids": [5], "sampling_params": greedy()})
    assert status == 200


async def test_bad_bodies_are_answered_with_400_and_the_server_serves_on(http: Http) -> None:
    for body, message in BAD_BODIES:
        status, reply = await http.post("/generate", body)
        assert (status, message in reply["error"]["message"]) == (400, True), (body, reply)
    status, reply = await http.post("/generate", {"input_ids": [5], "sampling_params": greedy()})
    assert (status, len(reply["output_ids"])) == (200, 4)
    assert await http.get("/health") == (200, {"status": "ok"})


async def test_neutral_values_that_routers_add_are_accepted(http: Http) -> None:
    sampling = greedy(min_p=0.0, repetition_penalty=1.0, stop=None, frequency_penalty=0, top_k=-1, json_schema=None)
    sampling |= {"stop_regex": [], "regex": "", "structural_tag": None}
    unserved = {
        "lora_path": "",
        "input_embeds": None,
        "image_data": [],
        "session_params": {},
        "token_ids_logprob": [],
        "return_hidden_states": False,
        "custom_logit_processor": None,
    }
    body = {"input_ids": [5], "sampling_params": sampling, "log_metrics": True, **unserved}
    assert (await http.post("/generate", body))[0] == 200
    batch = {"input_ids": [[5], [6]], "sampling_params": sampling, "lora_path": [None, None]}
    assert (await http.post("/generate", batch | {"return_hidden_states": [False, False]}))[0] == 200


async def test_long_bodies_are_refused(http: Http) -> None:
    status, reply = await http.post("/generate", io.BytesIO(b" " * (17 * 2**20)))
    assert status == 413
    assert "exceeds" in reply["error"]["message"]


async def test_ready_tells_who_answers(http: Http) -> None:
    expected = {"run_id": "run", "nonce": "abc", "policy_version": 0, "state": "serving"}
    assert await http.get("/ready") == (200, expected)


async def test_without_weights_nothing_is_served_until_a_commit() -> None:
    runner = EngineRunner(make_engine(policy_version=NO_VERSION), process="rollout-0")
    runner.start()
    async with serve(runner) as url, aiohttp.ClientSession(url) as session:
        http = Http(session)
        assert (await http.get("/health"))[0] == 200
        status, ready = await http.get("/ready")
        assert (status, ready["state"], ready["policy_version"]) == (503, "waiting_for_weights", NO_VERSION)
        status, reply = await http.post("/generate", {"input_ids": [5]})
        assert (status, reply["error"]["message"]) == (503, "no weights have been loaded yet")
        assert (await http.post("/weights/begin", weights_handle(0)))[0] == 200
        assert (await http.get("/ready"))[0] == 503
        assert (await http.post("/weights/commit", {"policy_version": 0}))[0] == 200
        assert (await http.get("/ready"))[1]["policy_version"] == 0
    await runner.stop()


def weights_handle(policy_version: int, path: str = "1") -> dict[str, Any]:
    return {"policy_version": policy_version, "path": path, "num_bytes": 1, "fingerprint": print_of(path)}


async def test_weights_are_a_transaction_that_may_be_repeated(http: Http) -> None:
    staged = {"state": "staged", "policy_version": 2, "fingerprint": print_of("1"), "transport": "shared_memory"}
    committed = {**staged, "state": "committed"}
    for _ in range(2):
        assert await http.post("/weights/begin", weights_handle(2)) == (200, staged)
    assert (await http.get("/ready"))[1]["policy_version"] == 0
    for _ in range(2):
        assert await http.post("/weights/commit", {"policy_version": 2}) == (200, committed)
    assert (await http.post("/weights/begin", weights_handle(2)))[0] == 200
    assert (await http.get("/ready"))[1]["policy_version"] == 2
    _, reply = await http.post("/generate", {"input_ids": [5], "sampling_params": greedy()})
    assert reply["output_ids"] == await greedy_tokens_of_seed(1)


async def greedy_tokens_of_seed(seed: int) -> list[int]:
    runner = EngineRunner(make_engine(seed), process="other")
    runner.start()
    async with serve(runner) as url, aiohttp.ClientSession(url) as session:
        _, reply = await Http(session).post("/generate", {"input_ids": [5], "sampling_params": greedy()})
    await runner.stop()
    ids: list[int] = reply["output_ids"]
    return ids


async def test_an_aborted_update_leaves_the_old_weights(http: Http) -> None:
    await http.post("/weights/begin", weights_handle(1))
    assert await http.post("/weights/abort", {}) == (200, {"state": "aborted"})
    status, reply = await http.post("/weights/commit", {"policy_version": 1})
    assert (status, reply["error"]["message"]) == (409, "commit of policy_version 1, but nothing is staged")
    assert (await http.get("/ready"))[1]["policy_version"] == 0
    _, reply = await http.post("/generate", {"input_ids": [5], "sampling_params": greedy()})
    assert reply["output_ids"] == await greedy_tokens_of_seed(0)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/weights/begin", weights_handle(0), 409, "not newer than the served 0"),
        ("/weights/begin", weights_handle(1, "missing"), 400, "cannot read the weights: missing"),
        ("/weights/begin", {"policy_version": 1}, 400, "missing required field"),
        ("/weights/begin", {**weights_handle(1), "policy_version": 2**31}, 400, "at most 2147483647"),
        ("/weights/begin", {**weights_handle(1), "policy_version": "1"}, 400, "Expected `int`"),
        ("/weights/begin", b"\x80\x04pickle", 400, "JSON handle with policy_version, path, num_bytes and fingerprint"),
        (
            "/weights/begin",
            {"serialized_named_tensors": ["gASV"], "flush_cache": True},
            400,
            "JSON handle with policy_version, path, num_bytes and fingerprint",
        ),
        ("/weights/commit", {"policy_version": 9}, 409, "nothing is staged"),
        ("/weights/commit", {}, 400, "missing required field"),
        ("/abort_request", b"x", 400, "malformed"),
        ("/abort_request", {"rid_prefix": ""}, 400, "rid_prefix"),
        ("/abort_request", {"rid": "a", "rid_prefix": "b"}, 400, "not both"),
        ("/release_memory_occupation", {"tags": ["kv"]}, 400, "Invalid enum value 'kv'"),
        ("/resume_memory_occupation", {"tags": []}, 400, "length >= 1"),
        ("/resume_memory_occupation", b"", 400, "truncated"),
    ],
)
async def test_bad_control_calls_are_refused(http: Http, path: str, body: Any, status: int, message: str) -> None:
    given, reply = await http.post(path, body)
    assert (given, message in reply["error"]["message"]) == (status, True), reply
    assert (await http.get("/ready"))[1]["policy_version"] == 0


async def test_a_newer_begin_replaces_what_was_staged(http: Http) -> None:
    await http.post("/weights/begin", weights_handle(1))
    await http.post("/weights/begin", weights_handle(2))
    assert (await http.post("/weights/commit", {"policy_version": 1}))[0] == 409
    assert (await http.post("/weights/commit", {"policy_version": 2}))[0] == 200


async def test_abort_request_ends_a_generation(http: Http, runner: EngineRunner, held: Held) -> None:
    body = {"input_ids": [5], "rid": "long", "sampling_params": greedy(90)}
    generation = asyncio.create_task(http.post("/generate", body))
    await until(lambda: runner.engine.num_active)
    assert await http.post("/abort_request", {"rid": "lon"}) == (200, {"aborted": 0, "unknown": ["lon"]})
    assert await http.post("/abort_request", {"rid": "long"}) == (200, {"aborted": 1, "unknown": []})
    status, reply = await generation
    assert (status, reply["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    assert 0 < len(reply["output_ids"]) < 90
    assert await http.post("/abort_request", {"abort_all": True}) == (200, {"aborted": 0, "unknown": []})


async def test_requests_whose_ids_begin_alike_end_together(http: Http, runner: EngineRunner, held: Held) -> None:
    bodies = [{"input_ids": [5], "rid": rid, "sampling_params": greedy(90)} for rid in ("a-1", "a-2", "b-1")]
    await runner.pause("in_place")
    running = [asyncio.create_task(http.post("/generate", body)) for body in bodies]
    await until(lambda: runner.engine.num_waiting == 3)
    await runner.continue_generation()
    await until(lambda: runner.engine.num_active == 3)
    assert await http.post("/abort_request", {"rid_prefix": "a-"}) == (200, {"aborted": 2, "unknown": []})
    held.let_go.set()
    ended = [(await each)[1]["meta_info"]["finish_reason"]["type"] for each in running]
    assert ended == ["abort", "abort", "length"]
    assert await http.post("/abort_request", {"rid_prefix": "a-"}) == (200, {"aborted": 0, "unknown": []})


async def test_memory_is_released_and_taken_back(http: Http, runner: EngineRunner, held: Held) -> None:
    body = {"input_ids": [5], "sampling_params": greedy(90)}
    held.let_go.set()
    _, whole = await http.post("/generate", body)
    held.let_go.clear()
    generation = asyncio.create_task(http.post("/generate", body))
    await until(lambda: runner.engine.num_active)
    for given in ({}, {"tags": ["kv_cache"]}):
        assert await http.post("/release_memory_occupation", given) == (200, {"state": "released"})
    status, part = await generation
    assert (status, part["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    assert part["output_ids"] == whole["output_ids"][: len(part["output_ids"])]
    status, ready = await http.get("/ready")
    assert (status, ready["state"]) == (503, "released")
    status, early = await http.post("/generate", body)
    assert (status, early["output_ids"], early["meta_info"]["finish_reason"]["type"]) == (200, [], "abort")
    assert (early["meta_info"]["weight_version"], early["meta_info"]["weight_versions"]) == ("", [])
    for _ in range(2):
        assert await http.post("/resume_memory_occupation", {}) == (200, {"state": "resumed"})
    held.let_go.set()
    assert (await http.post("/generate", body))[1]["output_ids"] == whole["output_ids"]


async def test_memory_is_released_and_taken_back_by_parts(http: Http, runner: EngineRunner) -> None:
    body = {"input_ids": [5], "sampling_params": greedy(9)}
    scored = {**body, "return_logprob": True, "logprob_start_len": 0, "input_ids": [5, 6]}
    _, before = await http.post("/generate", body)
    for tags in (["weights"], ["weights", "cuda_graph"], ["kv_cache"]):
        assert await http.post("/release_memory_occupation", {"tags": tags}) == (200, {"state": "released"})
        _, early = await http.post("/generate", body)
        assert (early["output_ids"], early["meta_info"]["finish_reason"]["type"]) == ([], "abort")
    status, reply = await http.post("/generate", scored)
    assert (status, "the weights are released" in reply["error"]["message"]) == (409, True)
    assert runner.engine.released == {"weights", "kv_cache", "cuda_graph"}
    for tags in (["cuda_graph"], ["kv_cache"], ["kv_cache"]):
        assert await http.post("/resume_memory_occupation", {"tags": tags}) == (200, {"state": "resumed"})
        assert (await http.get("/ready"))[1]["state"] == "released"
    assert (await http.post("/weights/begin", weights_handle(1)))[0] == 200
    assert (await http.post("/weights/commit", {"policy_version": 1}))[0] == 200
    assert await http.post("/resume_memory_occupation", {"tags": ["weights"]}) == (200, {"state": "resumed"})
    _, after = await http.post("/generate", body)
    assert after["meta_info"]["weight_version"] == "1" and after["output_ids"] != before["output_ids"]
    assert (await http.post("/generate", scored))[0] == 200


async def test_a_client_that_leaves_frees_its_slots(http: Http, runner: EngineRunner, held: Held) -> None:
    generation = asyncio.create_task(http.post("/generate", {"input_ids": [5], "sampling_params": greedy(90)}))
    await until(lambda: runner.engine.num_active)
    generation.cancel()
    await until(lambda: not runner.engine.has_work)
    assert runner.engine.num_generated_tokens < 90


async def test_a_dead_engine_shows_in_health_and_ready(http: Http, runner: EngineRunner) -> None:
    del runner.engine.model.lm_head
    status, reply = await http.post("/generate", {"input_ids": [5], "sampling_params": greedy()})
    assert status == 500
    assert "lm_head" in reply["error"]["message"]
    assert (await http.get("/health"))[0] == 500
    status, ready = await http.get("/ready")
    assert (status, ready["state"]) == (503, "dead")


async def test_an_api_key_guards_everything_but_health(runner: EngineRunner) -> None:
    async with serve(runner, keys=ApiKeys(generation="secret")) as url, aiohttp.ClientSession(url) as session:
        http = Http(session)
        assert (await http.get("/health"))[0] == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert (await http.get("/ready", headers=headers))[0] == 401
            assert (await http.post("/generate", {"input_ids": [5]}, headers=headers))[0] == 401
        assert (await http.get("/ready", headers={"Authorization": "Bearer secret"}))[0] == 200


async def test_a_draining_commit_lets_running_answers_end_and_holds_the_others(
    http: Http, runner: EngineRunner, held: Held
) -> None:
    running = asyncio.create_task(http.post("/generate", {"input_ids": [5], "sampling_params": greedy(60)}))
    await until(lambda: runner.engine.num_active)
    await http.post("/weights/begin", weights_handle(1))
    commit = asyncio.create_task(http.post("/weights/commit", {"policy_version": 1, "mode": "drain"}))
    await until(lambda: not runner.engine.admitting)
    later = asyncio.create_task(http.post("/generate", {"input_ids": [5], "sampling_params": greedy(4)}))
    held.let_go.set()
    spans = [(await task)[1]["meta_info"]["weight_versions"] for task in (running, later)]
    assert (await commit)[0] == 200
    assert spans == [[{"version": "0", "start": 0, "end": 60}], [{"version": "1", "start": 0, "end": 4}]]


async def draining_for_ever(http: Http, runner: EngineRunner) -> asyncio.Task[tuple[int, Any]]:
    """A commit that waits for an answer that never ends."""
    request = make_request("long", [5], max_new_tokens=60)
    asyncio.get_running_loop().create_task(runner.generate(request)).add_done_callback(lambda done: done.exception())
    await until(lambda: runner.engine.num_active)
    await http.post("/weights/begin", weights_handle(1))
    commit = asyncio.create_task(http.post("/weights/commit", {"policy_version": 1, "mode": "drain"}))
    await until(lambda: not runner.engine.admitting)
    return commit


@pytest.mark.parametrize(
    ("path", "body"), [("/weights/abort", {}), ("/weights/begin", weights_handle(2)), ("/weights/forget", {})]
)
async def test_a_draining_commit_gives_way_to_whoever_drops_or_replaces_it(
    http: Http, runner: EngineRunner, held: Held, path: str, body: Any
) -> None:
    commit = await draining_for_ever(http, runner)
    assert (await http.post(path, body))[0] == 200
    status, reply = await commit
    assert (status, "another call stopped the wait for running answers" in reply["error"]["message"]) == (409, True)
    assert runner.policy_version == (NO_VERSION if path == "/weights/forget" else 0)
    await until(lambda: runner.engine.admitting)


async def test_a_draining_commit_ends_with_its_client(http: Http, runner: EngineRunner, held: Held) -> None:
    commit = await draining_for_ever(http, runner)
    commit.cancel()
    await until(lambda: runner.engine.admitting)
    assert (await http.post("/weights/commit", {"policy_version": 1}))[0] == 200, "it is still staged"


async def test_nothing_drains_while_paused_and_what_is_given_up_holds_nobody(
    http: Http, runner: EngineRunner, held: Held
) -> None:
    running = asyncio.create_task(http.post("/generate", {"input_ids": [5], "sampling_params": greedy(60)}))
    await until(lambda: runner.engine.num_generated_tokens > 2)
    await runner.pause("retract")
    assert (await http.get("/ready"))[1]["state"] == "paused"
    await http.post("/weights/begin", weights_handle(1))
    status, reply = await http.post("/weights/commit", {"policy_version": 1, "mode": "drain"})
    assert (status, "generation is paused" in reply["error"]["message"]) == (409, True)
    given_up = asyncio.create_task(runner.load_weights({}, 1, mode="drain"))
    await runner.score([1, 2])
    given_up.cancel()
    await runner.continue_generation()
    held.let_go.set()
    _, whole = await running
    assert [span["version"] for span in whole["meta_info"]["weight_versions"]] == ["0"]
    assert (await http.post("/generate", {"input_ids": [5], "sampling_params": greedy()}))[0] == 200


async def test_a_retracting_commit_computes_running_answers_anew(http: Http, runner: EngineRunner, held: Held) -> None:
    running = asyncio.create_task(http.post("/generate", {"input_ids": [5], "sampling_params": greedy(80)}))
    await until(lambda: runner.engine.num_generated_tokens > 5)
    await http.post("/weights/begin", weights_handle(1))
    await http.post("/weights/commit", {"policy_version": 1, "mode": "retract"})
    held.let_go.set()
    _, reply = await running
    old, new = reply["meta_info"]["weight_versions"]
    assert (old["version"], new["version"], new["end"]) == ("0", "1", 80)
    so_far = [5, *reply["output_ids"][: new["start"]]]
    body = {"input_ids": so_far, "sampling_params": greedy(80 - new["start"])}
    assert (await http.post("/generate", body))[1]["output_ids"] == reply["output_ids"][new["start"] :]


async def test_what_is_staged_is_forgotten_when_its_lease_ends(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout.update.LEASE_S", 0.0)
    update = WeightsUpdate(runner, receive_seed, fingerprint)
    await update.begin(make_handle(1))
    for _ in range(2):  # once for the timer, once for this
        await asyncio.sleep(0)
    with pytest.raises(Conflict, match="nothing is staged"):
        await update.commit(1)
    assert runner.policy_version == 0
