"""A product that nobody does in one's head, and a Python interpreter to ask."""

from __future__ import annotations

import random
from typing import Any

from penstock.sandbox import Limits, Outcome, python, run
from penstock.types import Task

LIMITS = Limits(wall_s=5.0, cpu_s=1, memory_bytes=256 << 20, max_processes=8, file_bytes=1 << 16)
INTERPRETER = python("-S", "-c", 'import sys; exec(compile(sys.stdin.read(), "<tool>", "single"))')
"""As at the prompt of Python: the value of an expression is shown."""
LONGEST_REPLY = 40
"""Characters that the policy sees of what the tool says."""


class PythonTool:
    """Asks for a product. What begins with `>` is run by the tool, and what that says is the next observation; anything
    else is the answer: reward 1 if it is right, else 0."""

    blocking = True
    needs_sandbox = True

    def __init__(self, task: Task, *, largest: int = 99) -> None:
        self._largest = largest
        self._reply = ""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        draw = random.Random(seed)
        factors = [draw.randint(2, self._largest) for _ in range(2)]
        self._question, self._answer = f"{factors[0]}*{factors[1]}", str(factors[0] * factors[1])
        return self._question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        info = {"expected": self._answer}
        if not action.startswith(">"):
            return "", float(action.strip() == self._answer), True, False, info
        outcome = run(INTERPRETER, stdin=f"{action[1:]}\n", limits=LIMITS)
        self._reply = reply_of(outcome)[:LONGEST_REPLY]
        return self._reply, 0.0, False, False, info

    def demonstrate(self) -> str:
        """Ask the tool, and say what it said."""
        return self._reply or f">{self._question}"


def reply_of(outcome: Outcome) -> str:
    """What it printed, else the last line of its error, else that it was too slow."""
    if outcome.exceeded:
        return "killed: too slow"
    return outcome.stdout.strip() or outcome.stderr.strip().rpartition("\n")[2] or "nothing"
