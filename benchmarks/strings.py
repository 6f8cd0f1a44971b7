"""Two tasks on strings, scored alike by any engine: this file imports nothing but the standard library.

`short`: spell a word of six letters backward, seven tokens with the end. `longtail`: copy a string of log-normal
length, so that most answers are short and a few are ten times as long.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORD = 6
MEDIAN, SIGMA, CAP = 16, 0.9, 150
SHORTEST = 8


def score(answer: str, expected: str) -> float:
    """Share of the longer string that matches from the left on."""
    right = 0
    while right < min(len(answer), len(expected)) and answer[right] == expected[right]:
        right += 1
    return right / max(len(answer), len(expected), 1)


def write_tasks(file: Path, *, workload: str, count: int, seed: int, growing: bool = False) -> None:
    """One JSON object per line: `question` and `answer`. `growing`: cut to a length that rises from `SHORTEST` to the
    longest, as lessons should be."""
    draw = random.Random(f"{workload}/{seed}")
    with file.open("w") as lines:
        for index in range(count):
            length = WORD
            if workload == "longtail":
                length = min(max(round(MEDIAN * draw.lognormvariate(0.0, SIGMA)), 1), CAP)
            if growing:
                length = min(length, round(SHORTEST + (CAP - SHORTEST) * index / count))
            text = "".join(draw.choices(LETTERS, k=length))
            answer = text if workload == "longtail" else text[::-1]
            lines.write(json.dumps({"question": text, "answer": answer}) + "\n")


class Say:
    """One turn: the answer is right from the left on, or not."""

    def __init__(self, task: Any) -> None:
        self._question, self._answer = str(task.payload["question"]), str(task.payload["answer"])

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return self._question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", score(action, self._answer), True, False, {"expected": self._answer}

    def demonstrate(self) -> str:
        return self._answer
