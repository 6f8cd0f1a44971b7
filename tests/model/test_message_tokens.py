"""Conversations become tokens and messages again, whatever they say."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.model.message_tokens import SPECIAL, MessageTokenizer, call_text
from penstock.model.random_answers import random_arguments

CHAT = MessageTokenizer()
MARKS = st.sampled_from([*SPECIAL, '"', "\\", "\n", "<tool_call>", "</tool_call>", "\x07", "\U000f0001", "☃", "{", "}"])
TEXTS = st.lists(st.one_of(MARKS, st.text(st.characters(exclude_categories=["Cs"]), max_size=4)), max_size=6).map(
    "".join
)
HEARD = st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXTS})
ANSWERS = st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXTS})
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@given(st.lists(st.one_of(HEARD, ANSWERS), max_size=5), HEARD)
def test_messages_are_read_as_they_were(before: list[dict[str, Any]], last: dict[str, Any]) -> None:
    found = CHAT.chat(CHAT.prompt([*before, last]))
    assert found.messages == [*before, last] and found.tools == [] and found.begun == ""


@given(TEXTS, TEXTS, TEXTS)
def test_an_episode_is_read_as_it_was_played(asked: str, answer: str, then: str) -> None:
    prompt, said = CHAT.prompt([{"role": "user", "content": asked}]), CHAT.answer_ids(answer)
    more = CHAT.continuation([{"role": "user", "content": then}], ended=True)
    expected = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": then},
    ]
    assert CHAT.chat([*prompt, *said, *more]).messages == expected
    assert CHAT.transcript([*prompt, *said]) == CHAT.transcript([*prompt, *said[:-1]]) == expected[:2]


@given(st.dictionaries(TEXTS, st.one_of(TEXTS, st.integers(-9, 9), st.booleans()), max_size=3))
def test_a_call_is_read_as_it_was_written(arguments: dict[str, Any]) -> None:
    prompt = CHAT.prompt([{"role": "user", "content": "-"}], tools=[TOOL])
    said = CHAT.answer_ids("so\n" + call_text("look", arguments))
    *_, message = CHAT.transcript([*prompt, *said])
    assert message["content"] == "so" and json.loads(message["tool_calls"][0]["function"]["arguments"]) == arguments


def test_each_call_has_a_result() -> None:
    prompt = CHAT.prompt([{"role": "user", "content": "-"}], tools=[TOOL])
    said = CHAT.answer_ids(call_text("look", {}) + call_text("look", {"a": 1}))
    for heard, roles in (
        ([{"role": "user", "content": "seen"}], ["tool", "tool", "user"]),
        ([{"role": "tool", "content": "seen"}], ["tool", "tool"]),
        ([{"role": "tool", "content": "seen"}, {"role": "user", "content": "go on"}], ["tool", "tool", "user"]),
    ):
        more = CHAT.continuation(heard, ended=True, tools=[TOOL])
        found = CHAT.chat([*prompt, *said, *more])
        _, assistant, *after = found.messages
        assert [each["role"] for each in after] == roles and found.tools == [TOOL]
        names = [call["id"] for call in assistant["tool_calls"]]
        assert [each["tool_call_id"] for each in after[:2]] == names and len(set(names)) == 2


SCHEMAS = st.recursive(
    st.one_of(
        st.sampled_from([{"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 5, "maximum": 7}]),
        st.sampled_from([{"enum": ["a", 1]}, {"const": 3}, {"type": ["integer", "null"]}, {}, {"type": "number"}]),
    ),
    lambda inner: st.one_of(
        inner.map(lambda each: {"type": "array", "items": each}),
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}),
    ),
    max_leaves=4,
)


@given(SCHEMAS, st.integers(0, 99))
def test_random_arguments_fit_their_schema(schema: dict[str, Any], seed: int) -> None:
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": schema}}}}
    assert fits(random_arguments(Random(seed), tool, "some words")["x"], schema)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    kind = schema.get("type", "string")
    if isinstance(kind, list):
        return any(fits(value, {"type": each}) for each in kind)
    if kind == "array":
        return isinstance(value, list) and all(fits(each, schema["items"]) for each in value)
    kinds = {"string": str, "boolean": bool, "integer": int, "number": float, "null": type(None)}
    return isinstance(value, kinds[kind]) and (
        kind != "integer" or schema.get("minimum", 0) <= value <= schema.get("maximum", 99)
    )
