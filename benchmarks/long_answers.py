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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.types import Task

SHORTEST, GROWTH, HARDEST = 8.0, 1.45, 9
"""Median of the thinking: SHORTEST * GROWTH ** (hardness - 1) tokens, hardness 1 to HARDEST."""
WITHIN_SIGMA = 0.25
LONGEST = 240
LETTERS = "abcdefgh"
TURNS, TOOL_S, REWARD_S, SLOW_SIGMA = 4, 2.0, 5.0, 1.0
"""Turns with tools; median seconds of a tool and of a slow reward, and the standard deviation of their logarithms."""


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


class ThinkWithTools(Think):
    """The same question four times, and a slow tool after each answer but the last."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._num_answers = 0

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:  # type: ignore[override]
        _, reward, *_ = super().step(action)
        self._num_answers += 1
        if self._num_answers < TURNS:
            await asyncio.sleep(self._rng.lognormvariate(math.log(TOOL_S), SLOW_SIGMA))
        return self._question, reward, self._num_answers == TURNS, False, {}


async def slowly(answer: str, payload: Mapping[str, Any]) -> float:
    """Return the reward of `Think`, after a while."""
    await asyncio.sleep(random.lognormvariate(math.log(REWARD_S), SLOW_SIGMA))
    return float(answer.lstrip(".") == payload["answer"])


def write_tasks(path: Path, *, count: int, seed: int) -> None:
    """`count` questions, one JSON object per line. Hard ones are rarer: each level has three quarters of the last."""
    rng = random.Random(seed)
    levels = range(1, HARDEST + 1)
    hardness = rng.choices(levels, weights=[0.75**level for level in levels], k=count)
    with path.open("w") as file:
        for level in hardness:
            letter, noise = rng.choice(LETTERS), "".join(rng.choices(string.ascii_lowercase, k=4))
            file.write(json.dumps({"question": f"{letter}{level} {noise}", "answer": letter}) + "\n")
