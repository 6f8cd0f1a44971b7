"""A question that only a tool can answer."""

from __future__ import annotations

import json
import random
from typing import Any

from penstock.ports.environment import Action
from penstock.types import Task

LETTERS, LENGTH = "abcdefgh", 3
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Return the word behind a word.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


class Lookup:
    """The word behind another word is asked for. The policy calls `look`, reads the word, and answers with it.

    The metric `well_formed` is the share of turns in which the policy did what was due: a call of the tool before it
    has read something, plain text afterwards.
    """

    tools = (LOOK,)

    def __init__(self, task: Task, *, careless: float = 0.0) -> None:
        """`careless`: how often the expert gives up at once, or forgets the end of its call."""
        self._careless = careless
        self._rng = random.Random()
        self._key = self._word = ""
        self._has_looked = False

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._rng = random.Random(seed)
        self._key, self._word = ("".join(self._rng.choices(LETTERS, k=LENGTH)) for _ in range(2))
        self._has_looked = False
        return f"{self._key}?", {}

    def step(self, action: Action) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        is_plain = not action.calls and action.fault is None
        is_call = [call.name for call in action.calls] == ["look"] and set(action.calls[0].arguments) == {"key"}
        info = {"metrics": {"well_formed": float(is_plain if self._has_looked else is_call)}, "expected": self._word}
        if not action.calls:
            return "", float(action.content.strip() == self._word), True, False, info
        self._has_looked = self._has_looked or is_call
        found = self._word if is_call and action.calls[0].arguments["key"] == self._key else "nothing"
        return [{"role": "tool", "content": found}], 0.0, False, False, info

    def demonstrate(self) -> str:
        """Return the call, and then the answer."""
        if self._has_looked:
            return self._word
        call = json.dumps({"name": "look", "arguments": {"key": self._key}})
        if self._rng.random() >= self._careless:
            return f"<tool_call>\n{call}\n</tool_call>"
        return self._rng.choice(["?", f"<tool_call>\n{call}"])
