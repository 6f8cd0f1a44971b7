"""A multi-turn game: find a secret number from higher/lower hints."""

from __future__ import annotations

import random
from typing import Any

from penstock.types import Task


class GuessNumber:
    """The secret number lies in 1..`limit`, and there are `max_guesses` guesses. The reward is 1 for finding the
    number, else 0. A guess that is not a number in this range costs a turn."""

    def __init__(self, task: Task, *, limit: int = 15, max_guesses: int = 4) -> None:
        self._limit, self._max_guesses = limit, max_guesses

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._secret = random.Random(seed).randint(1, self._limit)
        self._low, self._high, self._guesses = 1, self._limit, 0
        return f"1-{self._limit}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._guesses += 1
        text = action.strip()
        guess = int(text) if text.isascii() and text.isdigit() else 0
        if guess == self._secret:
            return "yes", 1.0, True, False, {"expected": str(self._secret)}
        out_of_guesses = self._guesses >= self._max_guesses
        return self._hint(guess), 0.0, out_of_guesses, False, {"expected": str(self._secret)}

    def _hint(self, guess: int) -> str:
        if not 1 <= guess <= self._limit:
            return "what"
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
            return "higher"
        self._high = min(self._high, guess - 1)
        return "lower"

    def demonstrate(self) -> str:
        """Return the middle of the remaining range."""
        return str((self._low + self._high) // 2)
