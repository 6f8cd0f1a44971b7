"""A question that only a tool can answer."""

from __future__ import annotations

import json
import random
import string
from typing import Any

from penstock.ports.environment import Action
from penstock.types import Task

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Return the number under a letter.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


class Lookup:
    """The number under a letter is asked for. The policy calls `look`, reads the number, and answers with it.

    The metric `well_formed` is the share of turns in which the policy did what was due: a call of the tool before it
    has read something, plain text afterwards.
    """

    tools = (LOOK,)

    def __init__(self, task: Task) -> None:
        self._key = self._number = ""
        self._has_looked = False

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        rng = random.Random(seed)
        self._key, self._number = rng.choice(string.ascii_lowercase), str(rng.randint(10, 99))
        self._has_looked = False
        return f"{self._key}?", {}

    def step(self, action: Action) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        is_plain = not action.calls and action.fault is None
        is_call = [call.name for call in action.calls] == ["look"] and set(action.calls[0].arguments) == {"key"}
        info = {"metrics": {"well_formed": float(is_plain if self._has_looked else is_call)}, "expected": self._number}
        if not action.calls:
            return "", float(action.content.strip() == self._number), True, False, info
        self._has_looked = self._has_looked or is_call
        found = self._number if is_call and action.calls[0].arguments["key"] == self._key else "nothing"
        return [{"role": "tool", "content": found}], 0.0, False, False, info

    def demonstrate(self) -> str:
        """Return the call, and then the answer."""
        if self._has_looked:
            return self._number
        call = json.dumps({"name": "look", "arguments": {"key": self._key}})
        return f"<tool_call>\n{call}\n</tool_call>"
