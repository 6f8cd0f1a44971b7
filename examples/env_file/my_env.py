"""An environment in a file of its own. `python examples/env_file/my_env.py serve --run RUN` plays it for a run."""

from __future__ import annotations

import random
import string
from typing import Any

from penstock.types import Task

LETTERS = string.ascii_lowercase


class NextLetter:
    """Shows a few letters of the alphabet in a row; the answer is the one that follows."""

    def __init__(self, task: Task, *, shown: int = 2) -> None:
        self._shown = shown

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        start = random.Random(seed).randrange(len(LETTERS) - self._shown)
        self._answer = LETTERS[start + self._shown]
        return LETTERS[start : start + self._shown], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action.strip() == self._answer), True, False, {"expected": self._answer}

    def demonstrate(self) -> str:
        return self._answer


if __name__ == "__main__":
    from penstock.cli.attach import main

    main(NextLetter)
