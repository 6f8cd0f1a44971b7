"""One question, one answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from penstock.types import Task


class SingleTurn:
    """Shows the task's question and scores the answer with the rule of the dataset it came from."""

    def __init__(self, task: Task, *, prompt: str = "{question}") -> None:
        """`prompt` is a format string over the task's payload, e.g. `"{metadata[word]}"`."""
        self._entry = task.payload
        self._prompt = prompt
        self._score = _scorer(self._entry["metadata"]["source_dataset"])

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return self._prompt.format_map(self._entry), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(self._score(action, self._entry)), True, False, {"expected": self._entry["answer"]}

    def demonstrate(self) -> str:
        """The right answer."""
        return str(self._entry["answer"])


@functools.cache
def _scorer(dataset: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    score: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    return score
