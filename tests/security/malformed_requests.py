"""Requests that no server should accept, made from its OpenAPI description; the same ones for the same seed.

Nothing here talks to a server. A rollout server describes itself at `/openapi.json`; `openapi(surface.routes(),
ApiKeys())` of `penstock.rollout.app` describes the routes of the other servers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")
WRONG: dict[str, list[Any]] = {
    "string": ["text", "", "\x00"],
    "integer": [7, -1, 10**30],
    "number": [0.5, 1e300],
    "boolean": [True],
    "array": [[], [[]], [{}], [1, "a", None]],
    "object": [{}, {"a": [1]}],
    "null": [None],
}
"""Values by their JSON type."""
HEADERS: list[dict[str, str]] = [
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "nonsense"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Encoding": "gzip"},
    {"Authorization": "Basic !!!"},
    {"Authorization": "Bearer " + "x" * 4000},
    {"Accept": "image/*;q=nonsense"},
    {"Cookie": "=" * 2000},
    {"X-Forwarded-For": "\xff\xfe", "Range": "bytes=9-1", "If-Match": '"'},
    {"Expect": "nothing"},
    {"Accept-Encoding": ""},
]
GENERATION = ("/generate", "/v1/completions", "/v1/chat/completions")


class Malformed(NamedTuple):
    """One request, and what is wrong with it."""

    why: str
    method: str
    path: str
    body: bytes
    headers: dict[str, str]


def malformed(
    schema: dict[str, Any], count: int, seed: int, *, vocab_size: int, max_context: int
) -> Iterator[Malformed]:
    """`count` of them, over all operations of `schema`."""
    draw = random.Random(seed)
    bad_prompts = prompts(vocab_size, max_context)
    operations = [
        (path, method.upper(), what) for path, here in schema["paths"].items() for method, what in here.items()
    ]
    for number in range(count):
        path, method, operation = operations[number % len(operations)]
        headers = draw.choice(HEADERS) if draw.random() < 0.2 else {}
        if "requestBody" not in operation or draw.random() < 0.08:
            yield without_a_body(draw, path, set(map(str.upper, schema["paths"][path])), headers)
            continue
        shape = resolve(schema, operation["requestBody"]["content"]["application/json"]["schema"])
        makers: list[Callable[[], tuple[str, bytes]]] = [
            partial(broken, draw, path),
            partial(mistyped, draw, schema, shape, path),
        ]
        if path in GENERATION:
            makers += [partial(nonsense, draw, path, bad_prompts)] * 2
        why, body = draw.choice(makers)()
        yield Malformed(why, method, path, body, headers)


def without_a_body(draw: random.Random, path: str, methods: set[str], headers: dict[str, str]) -> Malformed:
    """A wrong method, or a path beside the right one."""
    concrete = path.replace("{name}", draw.choice(["nobody", "a/b", "%00", "..%2f"]))
    if draw.random() < 0.7 or "{" in path:
        method = draw.choice([method for method in METHODS if method not in methods])
        return Malformed("wrong method", method, concrete, draw.choice([b"", b"{", b"x" * 1000]), headers)
    beside = draw.choice([f"{concrete}/", f"{concrete}x", f"/x{concrete}", concrete.upper()])
    if beside.startswith("/v1/models"):
        beside = "/v1/model"
    return Malformed("no such path", draw.choice(METHODS), beside, b"{}", headers)


def broken(draw: random.Random, path: str) -> tuple[str, bytes]:
    """No JSON, or not of an object."""
    whole = json.dumps(valid(path)).encode()
    place = draw.randrange(1, len(whole))
    match draw.randrange(10):
        case 0:
            return "truncated", whole[:place]
        case 1:
            return "invalid UTF-8", whole[:-1] + b',"rid":"' + draw.choice(
                [b"\xff", b"\xc3\x28", b"\xed\xa0\x80"]
            ) + b'"}'
        case 2:
            return "random bytes", b"\x00" + draw.randbytes(draw.randrange(200))
        case 3:
            depth = draw.choice([5_000, 100_000])
            return "nested", whole[:-1] + b',"x":' + b"[" * depth + b"]" * depth + b"}"
        case 4:
            return "more behind it", whole + draw.choice([b"}", b"{}", b"\x00", b"null"])
        case 5:
            return "not of JSON", whole[:-1] + b',"y":' + draw.choice(
                [b"NaN", b"Infinity", b"-Infinity", b"0x1", b"01"]
            ) + b"}"
        case 6:
            return "another type", draw.choice([b"[]", b"null", b"1", b'"text"', b"true", b"[{}]"])
        case 7:
            return "nothing", draw.choice([b"", b" ", b"\n\n"])
        case 8 if path in GENERATION:
            return "unpaired surrogate", whole[:-1] + b',"rid":"\\ud800"}'
        case _:
            return "another encoding", json.dumps(valid(path)).encode("utf-16")


def mistyped(draw: random.Random, schema: dict[str, Any], shape: dict[str, Any], path: str) -> tuple[str, bytes]:
    """A field, or one below it, with a value of a type that it cannot have; or a required one missing."""
    fields = {name: it for name, it in shape.get("properties", {}).items() if types(schema, it)}
    if (required := shape.get("required")) and draw.random() < 0.2:
        name = draw.choice(required)
        return f"no {name}", json.dumps({key: it for key, it in valid(path).items() if key != name}).encode()
    if not fields:
        return broken(draw, path)
    name = draw.choice(sorted(fields))
    if name == "sampling_params" and draw.random() < 0.9:
        below = resolve(schema, {"$ref": "#/components/schemas/SamplingBody"})
        inner = draw.choice(sorted(key for key, it in below["properties"].items() if types(schema, it)))
        value = {inner: wrong(draw, types(schema, below["properties"][inner]))}
        return f"{name}.{value}", json.dumps({**valid(path), name: value}).encode()
    value = wrong(draw, types(schema, fields[name]))
    return f"{name}={value}", json.dumps({**valid(path), name: value}).encode()


def wrong(draw: random.Random, allowed: set[str]) -> Any:
    refused = sorted(WRONG.keys() - allowed - ({"integer"} if "number" in allowed else set()))
    return draw.choice(WRONG[draw.choice(refused)])


def types(schema: dict[str, Any], shape: dict[str, Any]) -> set[str]:
    """JSON types that a value may have; none if any will do."""
    shape = resolve(schema, shape)
    if "anyOf" in shape:
        each = [types(schema, one) for one in shape["anyOf"]]
        return set().union(*each) if all(each) else set()
    if "enum" in shape:
        return {"string"}
    return {shape["type"]} if "type" in shape else set()


def resolve(schema: dict[str, Any], shape: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in shape:
        shape = schema["components"]["schemas"][shape["$ref"].rpartition("/")[2]]
    return shape


def nonsense(draw: random.Random, path: str, bad_prompts: list[dict[str, Any]]) -> tuple[str, bytes]:
    """Well-typed, and impossible."""
    body = valid(path)
    if path == "/generate" and draw.random() < 0.5:
        change = draw.choice(bad_prompts)
        body = {key: it for key, it in body.items() if key != "input_ids"} | change
        return f"prompt {str(change)[:60]}", json.dumps(body).encode()
    names = {"max_new_tokens": "max_tokens", "sampling_seed": "seed"} if path != "/generate" else {}
    name, value = draw.choice(IMPOSSIBLE)
    if path == "/v1/chat/completions" and draw.random() < 0.4:
        name, value = draw.choice(IMPOSSIBLE_CHATS)
        return f"{name}={value!r:.60}", json.dumps(body | {name: value}).encode()
    if path == "/generate":
        body["sampling_params"] = body["sampling_params"] | {name: value}
    else:
        body[names.get(name, name)] = value
    return f"{name}={value!r:.60}", json.dumps(body).replace('"1e999"', "1e999").encode()


IMPOSSIBLE: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (-1, -0.0001, 1e-9, 101, 1e300, "1e999")),
    *(("top_p", value) for value in (0, -1, 1.0001, 1e300)),
    *(("top_k", value) for value in (2**31, 10**30)),
    *(("min_p", value) for value in (-0.1, 1.5)),
    *(("n", value) for value in (0, -1, 1025, 10**9, 10**30)),
    *(("max_new_tokens", value) for value in (-1, 10**6, 10**30)),
    *(("frequency_penalty", value) for value in (-2.1, 1e300)),
    *(("presence_penalty", value) for value in (2.1, -1e300)),
    *(("repetition_penalty", value) for value in (0, -1, 1e300)),
    *(("stop_token_ids", value) for value in ([-1], [10**30], list(range(1000)), [1, "a"], [None])),
    *(("stop", value) for value in ([""], "", ["x"] * 17, "x" * 257, [{}], [["a"]], [None], {"type": "regex"})),
    *(("logit_bias", value) for value in ({"-1": 1}, {"x": 1}, {"1": 101}, {"99999": 1}, {"1": None}, {"1": "1e999"})),
    ("ebnf", "root ::= x"),
    ("regex", "a+"),
    ("json_schema", "{}"),
    ("skip_special_tokens", False),
]
IMPOSSIBLE_CHATS: list[tuple[str, Any]] = [
    *(
        ("messages", value)
        for value in (
            [],
            [{}],
            [{"role": 1, "content": "a"}],
            [{"role": "user", "content": 1}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            [{"role": "user", "content": "A" * 5000}],
            [{"role": "user", "content": "REFUSE"}],
            [{"role": "assistant", "content": "A", "tool_calls": 1}],
            [{"role": "assistant", "content": "A", "tool_calls": [1]}],
            [{"role": "assistant", "content": "A", "tool_calls": [{"function": 1}]}],
            [{"role": "assistant", "content": "A", "tool_calls": [{"function": {"arguments": "{"}}]}],
        )
    ),
    *(("prompt_token_ids", value) for value in ([], [-1], [10**30], [64], [1] * 5000)),
    *(("top_logprobs", value) for value in (-1, 21, 5)),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "x"}}),
    ("tools", [{"type": "function"}]),
    ("response_format", {"type": "json_object"}),
    ("response_format", {}),
    ("chat_template_kwargs", {"messages": []}),
    ("continue_final_message", True),
    ("add_generation_prompt", False),
    ("best_of", 7),
]


def prompts(vocab_size: int, max_context: int) -> list[dict[str, Any]]:
    """For `/generate`, that cannot be served."""
    return [
        {},
        {"input_ids": []},
        {"input_ids": [-1]},
        {"input_ids": [vocab_size]},
        {"input_ids": [10**30]},
        {"input_ids": [-(10**30)]},
        {"input_ids": [1] * (max_context + 1)},
        {"input_ids": [1] * 100_000},
        {"text": "A" * 100_000},
        {"text": ""},
        {"text": []},
        {"input_ids": [[]]},
        {"input_ids": [[1], 2]},
        {"input_ids": [1, [2]]},
        {"input_ids": [[1], [2]], "rid": ["same", "same"]},
        {"input_ids": [[1], [2]], "rid": ["one"]},
        {"input_ids": [1], "rid": ["one"]},
        {"input_ids": [1], "text": "A"},
        {"input_ids": [[1]] * 1025},
        {"input_ids": [1], "top_logprobs_num": 65, "return_logprob": True},
        {"input_ids": [1], "top_logprobs_num": -1},
        {"input_ids": [1], "sampling_params": {"n": 2, "max_new_tokens": [1]}},
        {"input_ids": [1], "sampling_params": {"n": 2, "sampling_seed": [1, 2, 3]}},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": [1, -1], "n": 2}},
        {"input_ids": [1], "sampling_params": {"min_new_tokens": -1, "max_new_tokens": 2}},
        {"input_ids": [[1], [2]], "sampling_params": [{}]},
        {"input_ids": [1], "sampling_parms": {}},
        {"input_ids": [1], "sampling_params": {"x" * 1000: 1}},
    ]


TENSORS = {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "nobody"}
VALID: dict[str, dict[str, Any]] = {
    "/claim": {"run_id": "mine", "nonce": "a", "lease_s": 0.0},
    "/generate": {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}},
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1},
    "/v1/responses": {"input": "A", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "A"}]},
    "/v1/v1/messages": {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1},
    "/v1/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "A"}]},
    "/tokenize": {"prompt": "A"},
    "/detokenize": {"tokens": [1]},
    "/abort_request": {"rid": "nobody"},
    "/weights/begin": {"policy_version": 5, "path": "/nowhere", "num_bytes": 1, "fingerprint": "x"},
    "/weights/commit": {"policy_version": 5},
    "/get_weights_by_name": {"name": "nobody"},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/update_weights_from_tensor": {"serialized_named_tensors": ["x"]},
    "/init_weights_update_group": {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2},
    "/destroy_weights_update_group": {"group_name": "nobody"},
    "/update_weights_from_distributed": TENSORS,
    "/update_weight_version": {"new_version": 5},
    "/pause_generation": {"mode": "abort"},
    "/begin_weight_update": {"selector": "all"},
    "/release_memory_occupation": {"tags": ["kv_cache"]},
    "/resume_memory_occupation": {"tags": ["kv_cache"]},
}
"""By path, a body that would be served, or refused for what it asks."""


def valid(path: str) -> dict[str, Any]:
    return deepcopy(VALID.get(path, {"field": 1}))
