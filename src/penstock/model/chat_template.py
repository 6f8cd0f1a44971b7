"""Chat templates: jinja2 renders them as Hugging Face's `apply_chat_template` does, and their source says what they
look for in a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.model.files import AGAIN, ModelError
from penstock.sendable import encodable

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles of the OpenAI API. Every template may get them."""
PLAIN = frozenset(
    re.findall(
        r"\w+",
        "abs append count d default dict dictsort endswith find first float get index int items join keys last length "
        "list lstrip map max min namespace raise_exception range reject rejectattr round rsplit rstrip safe select "
        "selectattr split splitlines startswith strftime_now string strip sum tojson trim values",
    )
)
"""Filters, methods and functions that make nothing of a string but its beginning, its end or a part of it."""
TAKING_APART = frozenset({"list", "reject", "rsplit", "select", "split", "splitlines"})
"""Those that make several parts of a string. With `join` the template may put them together again."""


MOST_PRODUCT, MOST_EXPONENT = 10**6, 100
"""Maximum product of the sizes of the operands of `*` and `**`, and maximum exponent."""
PRIVATE_PAIR = re.compile(r"\\udb[89a-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")
"""Characters of planes 15 and 16, as JSON escapes them."""


class ChatTemplate:
    """A compiled template and the facts that its source tells."""

    def __init__(self, source: str) -> None:
        """Raises jinja2's `TemplateError` if the source does not compile."""
        env = _environment()
        tree = env.parse(source)
        self.source = source
        self._compiled = env.from_string(source)
        self.constants = frozenset(_constants(tree))
        """String constants of the template's expressions."""
        names = self.constants | {node.attr for node in tree.find_all(nodes.Getattr)}
        self.names = frozenset(name for name in names if name.isidentifier())
        """Words that the template may use as keys of a message or a tool."""
        self.roles = ROLES | {role for compare in tree.find_all(nodes.Compare) for role in _compared_roles(compare)}
        """Roles that a message may have."""
        self.rearranges = _rearranges(tree)
        """Whether the template may change the inside of a string."""

    def render(self, values: Mapping[str, Any]) -> str:
        """Return the rendered text. Raises `ModelError` for an unknown role, for what the template itself refuses, and
        if the template fails."""
        for message in values["messages"]:
            if (role := message.get("role")) not in self.roles:
                known = ", ".join(sorted(self.roles))
                raise ModelError(f"the chat template has no role {role!r}: use one of {known}")
        try:
            text = self._compiled.render(**values)
            if values.get("tools") and text == self._compiled.render(**{**values, "tools": None}):
                raise ModelError("the chat template ignores `tools`: use a template that renders them")
        except ModelError:
            raise
        except TemplateError as error:
            raise ModelError(f"the chat template rejected the conversation: {error}") from error
        except Exception as error:  # a template divides by zero, joins a text and a number, calls itself for ever
            raise ModelError(f"the chat template failed: {type(error).__name__}: {error}") from None
        return encodable(text)


def read_template(model_dir: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the template in chat_template.jinja, or in `config`, the content of tokenizer_config.json; None if there
    is none."""
    file = model_dir / "chat_template.jinja"
    try:
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((each["template"] for each in source if each["name"] == "default"), None)
        if source is None:
            return None
        return ChatTemplate(source)
    except (TemplateError, RecursionError, SyntaxError) as error:  # Python nests at most 20 loops
        raise ModelError(f"the chat template of {model_dir} does not compile: {error}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        where = f"the chat template in chat_template.jinja or tokenizer_config.json of {model_dir}"
        raise ModelError(f"{where} is no text ({error}): {AGAIN}") from None


class _GenerationTag(Extension):
    """The tag `{% generation %}`, with which templates mark the assistant's words. It does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Return JSON without HTML escapes: jinja2's own `tojson` adds them, and chat templates do not expect them.
    Private-use characters, of which a disguise consists, are never escaped."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
    return PRIVATE_PAIR.sub(lambda pair: str(json.loads(f'"{pair[0]}"')), text) if ensure_ascii else text


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2 with a limit for products and powers, because nothing can interrupt their computation."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(each) if hasattr(each, "__len__") else abs(each) for each in (left, right)]
        if sizes[0] * sizes[1] > MOST_PRODUCT or (operator == "**" and sizes[1] > MOST_EXPONENT):
            raise TemplateError(f"the operands of {operator} are too large")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def _constants(node: nodes.Node) -> Iterator[str]:
    return (const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str))


def _compared_roles(compare: nodes.Compare) -> Iterator[str]:
    """Yield the words with which a comparison compares a role."""
    attributes = {node.attr for node in compare.find_all(nodes.Getattr)}
    variables = {node.name for node in compare.find_all(nodes.Name)}
    constants = set(_constants(compare))
    if "role" in attributes | variables | constants:
        yield from (word for word in constants - {"role"} if word.isidentifier())


def _rearranges(tree: nodes.Node) -> bool:
    """Return whether a template does more with strings than to join them and to take their beginnings and ends."""
    operations = set(_operations(tree)) - {macro.name for macro in tree.find_all(nodes.Macro)}
    is_joined_again = "join" in operations and not TAKING_APART.isdisjoint(operations)
    return is_joined_again or not operations <= PLAIN or any(slice_.step for slice_ in tree.find_all(nodes.Slice))


def _operations(tree: nodes.Node) -> Iterator[str]:
    """Yield the names of the filters, methods and functions that a template uses; an empty one for an unknown one."""
    for filter_ in tree.find_all(nodes.Filter):
        yield filter_.name
        if filter_.name == "map":
            yield from map(_name_of, filter_.args[:1])
    yield from (_name_of(call.node) for call in tree.find_all(nodes.Call))


def _name_of(node: nodes.Node) -> str:
    match node:
        case nodes.Name(name=name) | nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
            return str(name)
        case nodes.Const(value=name):
            return str(name)
    return ""
