"""Reading of a policy's answers: reasoning, text and tool calls, in the format of the model's family.

A chat template tells the model in which format to call tools, and so it also tells how to read its answers. Text that
only looks like a call stays text: the answer says why (`fault`). Reading takes time in proportion to the text, whatever
a policy writes.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

import msgspec

from penstock.sendable import encodable

T = TypeVar("T")

THINK, THOUGHT = "<think>", "</think>"
THOUGHT_ENDS = f"\n{THOUGHT}\n\n"
LAST_TOKENS = 16
"""Tokens at the end of a prompt that hold `<think>` and the white space after it, if the prompt ends so."""
PLAIN_NAME = re.compile(r"[\w.:/-]{1,256}")
MOST_PARTS = 64
"""Most parts of a parameter's schema that are read for its types."""
MOST_CALLS = 64
"""An answer with more calls is not read: it stays text."""


class Call(NamedTuple):
    """A tool call."""

    name: str
    arguments: str
    """A JSON object, as text."""

    def tool_call(self, call_id: str) -> dict[str, Any]:
        """Return the call as chats of the OpenAI API have it."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAnswer:
    """What an answer says."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    fault: str | None = None
    """Reason why text that begins like a call is not one; None if there is no such text."""


class Decode(Protocol):
    """A function that returns the text of tokens."""

    def __call__(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str: ...


AUTO = "auto"


class Malformed(ValueError):
    """Text between the marks of a call that is no call."""


Tools = Sequence[Mapping[str, Any]]
ReadCalls = Callable[[str, Tools], Iterator[tuple[str, Any]]]
"""read(text between the marks, tools) yields (name, arguments) of each call. Raises `Malformed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How the models of a family write calls."""

    name: str
    marks: tuple[str, ...]
    """A chat template with one of these texts is of this family."""
    opening: str
    """Text before a call, or a list of calls. Empty if calls have no mark: then the whole answer is read."""
    closing: str = ""
    """Text after it. Empty if it goes on to the end of the answer."""
    wrapping: tuple[str, ...] = ()
    """Texts around all calls, which belong to no content."""
    inner: tuple[str, ...] = ()
    """Other texts that may be special tokens."""
    begins: str
    """Text with which a call of any tool begins."""
    begins_named: str = ""
    """Text with which a call of the tool `NAME` begins. Empty if the models of the family use several forms."""
    read: ReadCalls

    def before_calls(self, text: str) -> str:
        """Return the beginning of an answer that is part of no call, whatever follows."""
        if not self.opening:
            begun = text.lstrip()
            return "" if begun.startswith("{") or self.marks[0].startswith(begun[: len(self.marks[0])]) else text
        head, rest = self.split_head(text)
        if not rest:
            for mark in (self.opening, *self.wrapping):
                head = _without_beginning(head, mark)
        return head.rstrip()

    def split_head(self, text: str) -> tuple[str, str]:
        """Return the text before the first mark of a call, and the rest."""
        places = (place for mark in (self.opening, *self.wrapping) if (place := text.find(mark)) >= 0)
        first = min(places, default=len(text))
        return text[:first], text[first:]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How to read the answers of a model."""

    tools: ToolFormat | None
    """None if the template knows no tools."""
    reasons: bool
    """Whether the template knows reasoning between `<think>` and `</think>`."""

    @classmethod
    def of(cls, template: str, tool_format: str = AUTO) -> AnswerFormat:
        """Return the format of a chat template's source. `tool_format`: name of the format of calls; `AUTO`: the one
        that the template shows."""

        def is_it(each: ToolFormat) -> bool:
            return any(mark in template for mark in each.marks) if tool_format == AUTO else each.name == tool_format

        return cls(next(filter(is_it, FORMATS), None), THOUGHT in template)

    def foreign_format(self, text: str) -> str | None:
        """Return the name of another format in which a text has calls; None if there is none."""
        own = self.special_texts | {*(self.tools.marks if self.tools else ())}
        for each in FORMATS:
            if any(mark in text for mark in {each.opening, *each.marks} - own - {""}):
                return each.name
        return None

    def is_thinking(self, prompt_ids: Sequence[int], decode: Decode) -> bool:
        """Return whether a prompt ends with the beginning of the assistant's reasoning."""
        return self.reasons and decode(prompt_ids[-LAST_TOKENS:], skip_special=False).rstrip().endswith(THINK)

    def beginning(self, tool: str) -> str:
        """Return the text with which a call of `tool` begins; if `tool` is empty, a call of any tool. Raises ValueError
        if the format of the model does not allow it."""
        if self.tools is None:
            raise ValueError("`tool_choice`: the chat template has no tools, so only `auto` and `none` are served")
        if tool and not self.tools.begins_named:
            raise ValueError(f"`tool_choice`: a named tool is not served in the format {self.tools.name}")
        if not tool:
            return self.tools.begins
        if not PLAIN_NAME.fullmatch(tool):
            raise ValueError(f"`tool_choice`: {tool[:64]!r} is no plain name of a tool")
        return self.tools.begins_named.replace("NAME", tool)

    @property
    def special_texts(self) -> frozenset[str]:
        """Texts that belong to an answer although they may be special tokens."""
        own = (self.tools.opening, self.tools.closing, *self.tools.wrapping, *self.tools.inner) if self.tools else ()
        return frozenset(filter(None, (*own, THINK, THOUGHT)))

    def read(self, text: str, tools: Tools = (), *, is_thinking: bool = False) -> ParsedAnswer:
        """Return what an answer says. `tools`: those that were offered; without any, no call is read. `is_thinking`:
        the prompt ended with `<think>`."""
        reasoning, content = self._split(text, is_thinking) if self.reasons else ("", text)
        if not tools or self.tools is None:
            return ParsedAnswer(content=content, reasoning=reasoning)
        try:
            rest, calls = _calls(self.tools, content, tools)
        except Malformed as error:
            return ParsedAnswer(content=content, reasoning=reasoning, fault=str(error))
        return ParsedAnswer(content=rest, reasoning=reasoning, calls=tuple(calls))

    def visible(self, text: str, tools: Tools = (), *, is_thinking: bool = False) -> tuple[str, str]:
        """Return the reasoning and the content at the beginning of an answer, as far as later text cannot change
        them."""
        reasoning = ""
        if self.reasons:
            begun = text.lstrip()
            if THINK.startswith(begun):
                return "", ""
            if is_thinking or begun.startswith(THINK):
                thought, mark, rest = begun.removeprefix(THINK).partition(THOUGHT)
                if not mark:
                    return _without_beginning(thought, THOUGHT).strip("\n"), ""
                reasoning, text = thought.strip("\n"), rest.lstrip("\n")
        if not tools or self.tools is None:
            return reasoning, text
        return reasoning, self.tools.before_calls(text)

    def _split(self, text: str, is_thinking: bool) -> tuple[str, str]:
        """Return the reasoning and the rest of an answer."""
        begun = text.lstrip()
        if not is_thinking and not begun.startswith(THINK):
            return "", text
        thought, mark, rest = begun.removeprefix(THINK).partition(THOUGHT)
        return thought.strip("\n"), rest.lstrip("\n") if mark else ""


def _without_beginning(text: str, mark: str) -> str:
    """Return text without an end that may be the beginning of a mark."""
    return next((text[:-size] for size in range(min(len(mark), len(text)), 0, -1) if text.endswith(mark[:size])), text)


def call_ids(form: AnswerFormat, prompt_ids: Sequence[int], token_ids: Sequence[int], count: int) -> list[str]:
    """Return names for the calls of an answer, always the same ones. Mistral's templates demand nine characters."""
    if not count:
        return []
    said = sha256(msgspec.msgpack.encode((prompt_ids, token_ids))).hexdigest()
    digests = (sha256(f"{said} {number}".encode()).hexdigest() for number in range(count))
    is_short = form.tools is not None and form.tools.name == "mistral"
    return [digest[:9] if is_short else f"call_{digest[:24]}" for digest in digests]


def with_decoded_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call of a message as chat templates expect it: its arguments are an object. Raises ValueError if they
    are no JSON."""
    function = call.get("function", {})
    if isinstance(arguments := function.get("arguments"), str):
        function = function | {"arguments": json.loads(arguments or "{}")}
    return call | {"function": function}


def _calls(form: ToolFormat, text: str, tools: Tools) -> tuple[str, list[Call]]:
    """Return the text outside of calls, and the calls. Raises `Malformed`."""
    if not form.opening:
        calls = [_call(*each) for each in _few(form.read(text.strip(), tools))]
        return ("" if calls else text), calls
    head, rest = form.split_head(text)
    between, *regions = rest.split(form.opening, MOST_CALLS + 1)
    if not regions:
        return text, []
    parts, calls = [between.strip()], []
    for region in _few(regions):
        inside, closing, after = region.partition(form.closing) if form.closing else (region, "", "")
        if form.closing and not closing:
            raise Malformed(f"a call does not end with {form.closing}")
        calls += (_call(*each) for each in _few(form.read(inside.strip(), tools)))
        parts.append(after.strip())
    for mark in form.wrapping:
        parts = [part.replace(mark, "").strip() for part in parts]
    return "\n".join(filter(None, (head.rstrip(), *parts))), [*_few(calls)]


def _few(parts: Iterable[T]) -> Iterator[T]:
    """Yield at most `MOST_CALLS` parts. Raises `Malformed` if there are more."""
    for number, part in enumerate(parts):
        if number == MOST_CALLS:
            raise Malformed(f"the answer has more than {MOST_CALLS} calls")
        yield part


def _call(name: object, arguments: object) -> Call:
    if not isinstance(name, str) or not name:
        raise Malformed("a call names no tool")
    if not isinstance(arguments, dict):
        raise Malformed(f"the arguments of a call of {name[:64]} are no JSON object")
    try:
        return Call(encodable(name), encodable(json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
    except ValueError:
        raise Malformed(f"the arguments of a call of {name[:64]} have a number that JSON lacks") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _decoded(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a call is not valid JSON: {error}") from None


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON object or list."""
    found = _decoded(text)
    for each in found if isinstance(found, list) else [found]:
        if not isinstance(each, dict):
            raise Malformed("a call is no JSON object")
        yield each


def _named(each: Mapping[str, Any]) -> tuple[Any, Any]:
    arguments = each.get("arguments", each.get("parameters", {}))
    return each.get("name"), _decoded(arguments) if isinstance(arguments, str) else arguments


def _read_json(text: str, tools: Tools) -> Iterator[tuple[str, Any]]:
    """`{"name": ..., "arguments": {...}}`, or a list of these."""
    yield from map(_named, _objects(text))


def _read_bare(text: str, tools: Tools) -> Iterator[tuple[str, Any]]:
    """One such object without marks, or after `<|python_tag|>`, or several with a semicolon between them."""
    text = text.removeprefix("<|python_tag|>").lstrip()
    if not text.startswith("{") or '"name"' not in text:
        return
    decoder, place = json.JSONDecoder(parse_constant=_refuse), 0
    while place < len(text):
        try:
            found, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"a call is not valid JSON: {error}") from None
        if not isinstance(found, dict) or "name" not in found:
            raise Malformed("a call names no tool")
        if not {"arguments", "parameters"} & found.keys() and found["name"] not in _names(tools):
            raise Malformed("an object with a name is no call: it has no parameters, and no tool has this name")
        yield _named(found)
        between = _BETWEEN.match(text, place)
        place = between.end() if between else place


def _read_mistral(text: str, tools: Tools) -> Iterator[tuple[str, Any]]:
    """A list of calls, or `NAME[ARGS]{...}`, perhaps with `[CALL_ID]...` before `[ARGS]`."""
    if text.startswith(("[", "{")):
        yield from _read_json(text, tools)
        return
    name, mark, arguments = text.partition("[ARGS]")
    if not mark:
        name, brace, rest = text.partition("{")
        arguments = brace + rest
    yield name.partition("[CALL_ID]")[0].strip(), _decoded(arguments)


def _read_deepseek(text: str, tools: Tools) -> Iterator[tuple[str, Any]]:
    """`NAME<sep>{...}`, or `function<sep>NAME` and then the arguments in a block of JSON."""
    name, mark, rest = text.partition(DEEPSEEK_SEPARATOR)
    if not mark:
        raise Malformed(f"a call has no {DEEPSEEK_SEPARATOR}")
    if name.strip() == "function":
        name, _, rest = rest.partition("\n")
        rest = rest.strip().removeprefix("```json").removesuffix("```")
    yield name.strip(), _decoded(rest)


def _read_tagged(named: re.Pattern[str], value: re.Pattern[str]) -> ReadCalls:
    """Return a reader of calls with their arguments between tags. They are text, and become what the tool's schema
    says."""

    def read(text: str, tools: Tools) -> Iterator[tuple[str, Any]]:
        head = named.match(text)
        if head is None:
            raise Malformed("a call names no tool")
        name = head["name"].strip()
        beside = value.sub("", text[head.end() :]).replace("</function>", "").strip()
        if beside:
            raise Malformed(f"a call of {name[:64]} has text beside its arguments: {beside[:64]!r}")
        yield name, {found["key"]: _typed(found["value"], name, found["key"], tools) for found in value.finditer(text)}

    return read


def _typed(text: str, tool: str, key: str, tools: Tools) -> Any:
    """Return an argument as its schema says: text stays text, everything else is JSON if it can be."""
    if "string" in _types(tool, key, tools):
        return text
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _names(tools: Tools) -> list[Any]:
    functions = (each.get("function", each) for each in tools)
    return [each.get("name") for each in functions if isinstance(each, Mapping)]


def _types(tool: str, key: str, tools: Tools) -> Sequence[object]:
    for each in tools:
        function = each.get("function", each)
        if isinstance(function, Mapping) and function.get("name") == tool:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            return _declared(schema)
    return []


def _declared(schema: object) -> list[object]:
    """Return the types that a JSON schema allows. Only its first `MOST_PARTS` parts are read."""
    found, parts = list[object](), deque([schema])
    for _ in range(MOST_PARTS):
        if not parts:
            break
        if not isinstance(part := parts.popleft(), Mapping):
            continue
        found += _listed(part.get("type"))
        values = [*_listed(part.get("enum")), part.get("const")]
        found += ["string"] if any(isinstance(value, str) for value in values) else []
        parts.extend(each for name in ("anyOf", "oneOf", "allOf") for each in _listed(part.get(name))[:MOST_PARTS])
    return found


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


_BETWEEN = re.compile(r"[;\s]*")
DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_CODER_VALUE = re.compile(
    r"<parameter=(?P<key>[^<>\n]{1,256})>\n?(?P<value>(?:[^<\n]|\n(?!</parameter>)|<(?!/parameter>|parameter=))*)\n?</parameter>"
)
_GLM_VALUE = re.compile(
    r"<arg_key>(?P<key>[^<]*)</arg_key>[ \n]*<arg_value>(?P<value>(?:[^<]|<(?!/arg_value>|arg_key>))*)</arg_value>"
)
FORMATS = (
    ToolFormat(
        name="qwen3_coder",
        marks=("<function=",),
        opening="<tool_call>",
        closing="</tool_call>",
        begins="<tool_call>\n<function=",
        begins_named="<tool_call>\n<function=NAME>\n",
        read=_read_tagged(re.compile(r"<function=(?P<name>[\w.:/-]{1,256})>"), _CODER_VALUE),
    ),
    ToolFormat(
        name="glm",
        marks=("<arg_key>",),
        opening="<tool_call>",
        closing="</tool_call>",
        begins="<tool_call>",
        begins_named="<tool_call>NAME\n",
        read=_read_tagged(re.compile(r"(?P<name>[\w.:/-]{1,256})"), _GLM_VALUE),
    ),
    ToolFormat(
        name="hermes",
        marks=("<tool_call>",),
        opening="<tool_call>",
        closing="</tool_call>",
        begins='<tool_call>\n{"name": "',
        begins_named='<tool_call>\n{"name": "NAME", "arguments":',
        read=_read_json,
    ),
    ToolFormat(
        name="deepseek",
        marks=("<\uff5ctool\u2581call\u2581begin\uff5c>",),
        opening="<\uff5ctool\u2581call\u2581begin\uff5c>",
        closing="<\uff5ctool\u2581call\u2581end\uff5c>",
        wrapping=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
        inner=(DEEPSEEK_SEPARATOR,),
        begins="<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>",
        read=_read_deepseek,
    ),
    ToolFormat(
        name="mistral",
        marks=("[TOOL_CALLS]",),
        opening="[TOOL_CALLS]",
        inner=("[ARGS]", "[CALL_ID]"),
        begins="[TOOL_CALLS]",
        read=_read_mistral,
    ),
    ToolFormat(
        name="llama3",
        marks=("<|python_tag|>", "Environment: ipython"),
        opening="",
        inner=("<|python_tag|>",),
        begins='{"name": "',
        begins_named='{"name": "NAME", "parameters":',
        read=_read_bare,
    ),
)
"""The first one that a chat template shows."""
