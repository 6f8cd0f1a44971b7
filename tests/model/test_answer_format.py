"""What an answer says, in the formats of the families, and of hostile policies."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model.answer_format import FORMATS, MOST_CALLS, AnswerFormat, Call, ParsedAnswer

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "unit": {"type": "string"}}},
    },
}
TOOLS = [ADD]
CALL = Call("add", json.dumps({"a": 3, "unit": "4"}))
JSON = json.dumps({"name": "add", "arguments": {"a": 3, "unit": "4"}})
SEPARATOR, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
AROUND = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
ARGUMENTS = '{"a": 3, "unit": "4"}'
WRITTEN = {
    "hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n<parameter=unit>\n4\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>3</arg_value>\n<arg_key>unit</arg_key>\n"
    "<arg_value>4</arg_value>\n</tool_call>",
    "mistral": f"[TOOL_CALLS][{JSON}]",
    "deepseek": AROUND.format(f"{BEGIN}add{SEPARATOR}{ARGUMENTS}{END}"),
    "llama3": json.dumps({"name": "add", "parameters": {"a": 3, "unit": "4"}}),
}


def of(name: str, *, reasons: bool = True) -> AnswerFormat:
    return AnswerFormat(next(each for each in FORMATS if each.name == name), reasons)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_is_read_in_the_format_of_its_family(name: str) -> None:
    assert of(name).read(WRITTEN[name], TOOLS) == ParsedAnswer(calls=(CALL,))
    thought = of(name).read(f"<think>\nthree and four\n</think>\n\n{WRITTEN[name]}", TOOLS)
    assert thought == ParsedAnswer(reasoning="three and four", calls=(CALL,))
    assert of(name).read(f"hm</think>{WRITTEN[name]}", TOOLS, is_thinking=True).reasoning == "hm"


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - {"llama3"}))
def test_text_around_calls_is_content(name: str) -> None:
    assert of(name).read(f"I add.\n{WRITTEN[name]}", TOOLS) == ParsedAnswer(content="I add.", calls=(CALL,))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", WRITTEN["hermes"] + "\n" + WRITTEN["hermes"]),
        ("qwen3_coder", WRITTEN["qwen3_coder"] * 2),
        ("glm", WRITTEN["glm"] * 2),
        ("mistral", f"[TOOL_CALLS][{JSON}, {JSON}]"),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{ARGUMENTS}"),
        ("mistral", f"[TOOL_CALLS]add{ARGUMENTS}[TOOL_CALLS]add{ARGUMENTS}"),
        ("deepseek", AROUND.format(f"{BEGIN}function{SEPARATOR}add\n```json\n{ARGUMENTS}\n```{END}\n" * 2)),
        ("llama3", f"<|python_tag|>{JSON}; {JSON}"),
    ],
)
def test_several_calls_are_read(name: str, text: str) -> None:
    assert of(name).read(text, TOOLS).calls == (CALL, CALL)


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 3}</tool_call>', "a call is not valid JSON"),
        ("hermes", f"<tool_call>{JSON}", "a call does not end with </tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "a call names no tool"),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            "arguments of a call of add are no JSON",
        ),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no number of JSON"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>', "a number that JSON lacks"),
        ("hermes", "<tool_call>7</tool_call>", "a call is no JSON object"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "a call is not valid JSON"),
        ("hermes", WRITTEN["hermes"] * (MOST_CALLS + 1), f"more than {MOST_CALLS} calls"),
        ("qwen3_coder", "<tool_call>add(3, 4)</tool_call>", "a call names no tool"),
        ("glm", "<tool_call></tool_call>", "a call names no tool"),
        ("glm", "<tool_call>add\n3</tool_call>", "a call of add has text beside its arguments: '3'"),
        ("glm", "<tool_call>I will add</tool_call>", "a call of I has text beside its arguments"),
        ("glm", f"<tool_call>{JSON}</tool_call>", "a call names no tool"),
        ("qwen3_coder", "<tool_call><function=add><parameter=a>3</tool_call>", "has text beside its arguments"),
        ("hermes", f"<tool_call>[{', '.join([JSON] * 40)}]</tool_call>" * 2, f"more than {MOST_CALLS} calls"),
        ("mistral", "[TOOL_CALLS]add[ARGS]3, 4", "a call is not valid JSON"),
        ("deepseek", f"{BEGIN}add{{}}{END}", "a call has no"),
        ("llama3", '{"name": "add", "parameters": {"a": 3}', "a call is not valid JSON"),
    ],
)
def test_what_only_looks_like_a_call_stays_text(name: str, text: str, fault: str) -> None:
    found = of(name).read(text, TOOLS)
    assert found.content == text and found.calls == () and fault in (found.fault or "")


def test_an_object_is_a_call_of_llama_only_with_parameters_or_the_name_of_a_tool() -> None:
    plain = '{"name": "Ada", "age": 36}'
    assert of("llama3").read(plain, TOOLS).content == plain
    assert of("llama3").read('{"name": "add"}', TOOLS).calls == (Call("add", "{}"),)


def test_without_tools_no_call_is_read() -> None:
    assert of("hermes").read(WRITTEN["hermes"]) == ParsedAnswer(content=WRITTEN["hermes"])


def test_unfinished_reasoning_is_no_content() -> None:
    assert of("hermes").read("<think>and so on") == ParsedAnswer(reasoning="and so on")
    assert of("hermes").read("and so on", is_thinking=True) == ParsedAnswer(reasoning="and so on")
    assert of("hermes").read("x <think>y</think>") == ParsedAnswer(content="x <think>y</think>")
    assert of("hermes", reasons=False).read("<think>a</think>b") == ParsedAnswer(content="<think>a</think>b")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("...<tool_call>\n{{ tool_call }}</tool_call>", "hermes"),
        ("<tool_call>\n<function=' + name", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm"),
        ("[TOOL_CALLS]", "mistral"),
        (f"'{BEGIN}'", "deepseek"),
        ("<|python_tag|>", "llama3"),
        ("{{ messages }}", None),
    ],
)
def test_the_family_is_found_in_the_template(template: str, name: str | None) -> None:
    found = AnswerFormat.of(template).tools
    assert (found and found.name) == name


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    JSON,
    "{",
    "}",
    "a",
    " ",
    "\n",
]
PIECES += ["<function=add>", "<parameter=a>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
PIECES += [BEGIN, END, SEPARATOR, "<|python_tag|>", '"name"', "3", "\ud800"]


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), thinks=st.booleans())
@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_every_text_can_be_read(name: str, pieces: list[str], thinks: bool) -> None:
    text = "".join(pieces)
    found = of(name).read(text, TOOLS, is_thinking=thinks)
    for call in found.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not found.calls and not found.reasoning and not thinks:
        assert found.content == text or text.lstrip().startswith("<think>")


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), thinks=st.booleans())
@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_what_is_visible_early_is_the_beginning_of_the_answer(name: str, pieces: list[str], thinks: bool) -> None:
    form, text = of(name), "".join(pieces)
    whole, shown = form.read(text, TOOLS, is_thinking=thinks), ("", "")
    for end in range(len(text) + 1):
        visible = form.visible(text[:end], TOOLS, is_thinking=thinks)
        assert visible[0].startswith(shown[0]) and visible[1].startswith(shown[1]), "what was shown stays"
        shown = visible
    assert whole.reasoning.startswith(shown[0]) and whole.content.startswith(shown[1])


LONG = 1_000_000
"""Characters of a text that would take hours if its reading took time in proportion to the square of its length."""


@pytest.mark.parametrize("name", [each.name for each in FORMATS])
@pytest.mark.parametrize(
    "piece",
    [*PIECES, "<parameter=a><", "<function=", "<arg_key>a</arg_key><arg_value>", '{"name":', "[[", "<tool_call>{"],
)
def test_long_hostile_text_is_read(name: str, piece: str) -> None:
    form, text = of(name), piece * (LONG // len(piece))
    assert form.read(text, TOOLS).calls == () or piece == JSON
    form.read(f"<tool_call>{text}</tool_call>", TOOLS)


def tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": schema}}}}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "string"}, "3", "3"),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "3", "3"),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"type": "string"}, "a\n\nb\n", "a\n\nb\n"),
        ({"type": "integer"}, "3", 3),
        ({"type": "array"}, "[1, 2]", [1, 2]),
        ({"type": "boolean"}, "true", True),
        ({}, "x", "x"),
        (None, "3", 3),
        ({"enum": 5, "anyOf": {"type": "string"}}, "3", "3"),
        ({"type": 5, "enum": {"a": "b"}, "oneOf": [None, 7, []]}, "3", 3),
        ({"anyOf": [{"type": "integer"}] * 20_000 + [{"type": "string"}]}, "3", 3),
        (functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(5000), {"type": "string"}), "3", 3),
    ],
)
def test_arguments_between_tags_become_what_the_schema_says(schema: Any, written: str, value: Any) -> None:
    text = f"<tool_call><function=add><parameter=a>\n{written}\n</parameter></function></tool_call>"
    (call,) = of("qwen3_coder").read(text, [tool(schema)]).calls
    assert json.loads(call.arguments) == {"a": value}
