"""A task with long-tailed answers that a tiny policy can learn: think for a while, then answer.

The question is a letter, how hard it is said to be, and noise; the answer is dots (the thinking) and then the letter.
The demonstrations think for a log-normal time whose median grows with the hardness, and so does the policy that
imitates them. Only what follows the dots is rewarded, so training has little reason to change the lengths.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import string
from pathlib import Path
from typing import Any

from penstock.types import Task

SHORTEST, GROWTH, HARDEST = 8.0, 1.45, 9
"""Median of the thinking: SHORTEST * GROWTH ** (hardness - 1) tokens, hardness 1 to HARDEST."""
WITHIN_SIGMA = 0.25
LONGEST = 240
LETTERS = "abcdefgh"
TURNS, TOOL_S, TOOL_SIGMA = 4, 0.5, 1.0
"""Of `Research`: turns, and the median time of the tool, which is log-normal."""


class Think:
    """One question, one answer; exact answers are rewarded."""

    def __init__(self, task: Task) -> None:
        self._question = str(task.payload["question"])
        self._answer = str(task.payload["answer"])
        self._rng = random.Random()

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._rng.seed(seed)
        return self._question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action.lstrip(".") == self._answer), True, False, {"expected": self._answer}

    def demonstrate(self) -> str:
        """Thinking and the right answer."""
        median = SHORTEST * GROWTH ** (int(self._question[1]) - 1)
        length = round(median * math.exp(self._rng.gauss(0, WITHIN_SIGMA)))
        return "." * min(max(length, 1), LONGEST) + self._answer


class Research(Think):
    """The same question over several turns, with a slow tool after each. Only the last answer is rewarded."""

    num_turns = 0

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        self.num_turns += 1
        await asyncio.sleep(self._rng.lognormvariate(math.log(TOOL_S), TOOL_SIGMA))
        if self.num_turns < TURNS:
            return self._question, 0.0, False, False, {}
        return super().step(action)


def write_tasks(path: Path, *, count: int, seed: int) -> None:
    """`count` questions, one JSON object per line. Hard ones are rarer: each level has three quarters of the last."""
    rng = random.Random(seed)
    levels = range(1, HARDEST + 1)
    hardness = rng.choices(levels, weights=[0.75**level for level in levels], k=count)
    with path.open("w") as file:
        for level in hardness:
            letter, noise = rng.choice(LETTERS), "".join(rng.choices(string.ascii_lowercase, k=4))
            file.write(json.dumps({"question": f"{letter}{level} {noise}", "answer": letter}) + "\n")
