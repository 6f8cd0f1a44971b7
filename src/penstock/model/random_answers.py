"""Random answers, for policies that compute nothing."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

LONGEST_WORD = 6
"""Maximum number of letters in a random word."""
LARGEST = 99
"""Largest random number, unless a schema allows only larger ones."""
MOST_ITEMS, DEEPEST = 3, 4
"""Most items of a random list, and the depth below which a random value is null."""


def random_word(draw: Random, heard: str) -> str:
    """Return a word of the text that was heard, a number, or random letters."""
    letters = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, LONGEST_WORD)))
    return draw.choice([letters, str(draw.randint(0, LARGEST)), *heard.split()])


def random_arguments(draw: Random, tool: Mapping[str, Any], heard: str) -> dict[str, Any]:
    """Return arguments that fit the tool's JSON schema, as far as it gives types, values and bounds of numbers."""
    parameters = tool.get("function", {}).get("parameters") or {}
    return {name: _value(draw, schema, heard) for name, schema in (parameters.get("properties") or {}).items()}


def _value(draw: Random, schema: Any, heard: str, depth: int = 0) -> Any:
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return draw.choice(schema["enum"])
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _value(draw, draw.choice(choices), heard, depth + 1)
    kind = schema.get("type", "string")
    match draw.choice(kind) if isinstance(kind, Sequence) and not isinstance(kind, str) else kind:
        case "integer":
            return draw.randint(*_bounds(schema))
        case "number":
            return draw.uniform(*_bounds(schema))
        case "boolean":
            return draw.random() < 0.5
        case "array":
            return [_value(draw, schema.get("items", {}), heard, depth + 1) for _ in range(draw.randint(0, MOST_ITEMS))]
        case "object":
            properties = schema.get("properties") or {}
            return {name: _value(draw, each, heard, depth + 1) for name, each in properties.items()}
        case "string":
            return random_word(draw, heard)
    return None


def _bounds(schema: Mapping[str, Any]) -> tuple[int, int]:
    least = int(schema.get("minimum", 0))
    return least, max(int(schema.get("maximum", LARGEST)), least)
