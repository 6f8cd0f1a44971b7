"""One question, one answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import reasoning_gym

from penstock.config import ConfigError
from penstock.types import Task


class SingleTurn:
    """Shows the task's question and scores the answer with the rule of the dataset it came from."""

    def __init__(self, task: Task, *, prompt: str = "{question}", full_marks_only: bool = False) -> None:
        """`prompt` is a format string over the task's payload, e.g. `"{metadata[word]}"`. With `full_marks_only` an
        answer that the rule gives less than 1 earns nothing: partial credit often pays for the wrong thing (a right
        beginning with rubbish behind it, say)."""
        self._entry = task.payload
        self._prompt = prompt
        self._full_marks_only = full_marks_only
        self._score = _scorer(self._entry["metadata"]["source_dataset"])

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        try:
            return self._prompt.format_map(self._entry), {}
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"env.options.prompt {self._prompt!r} does not fit the tasks, which have "
                f"{', '.join(self._entry)}: {type(error).__name__} {error}"
            ) from None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        score = float(self._score(action, self._entry))
        reward = float(score == 1.0) if self._full_marks_only else score
        return "", reward, True, False, {"expected": self._entry["answer"]}

    def demonstrate(self) -> str:
        """The right answer."""
        return str(self._entry["answer"])


@functools.cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    score: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    return score
