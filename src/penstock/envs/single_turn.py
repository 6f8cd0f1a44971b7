"""The built-in environment with one question and one answer."""

from __future__ import annotations

from typing import Any

from penstock.config import ConfigError
from penstock.envs.rewards.dataset_rule import AUDITED, dataset_of, rule_of
from penstock.ports.environment import TaskError
from penstock.types import Task


class SingleTurn:
    """Shows the task's question. The rule of the task's reasoning-gym dataset scores the answer: here if the rule is
    audited, else the reward `reasoning_gym` does, in a sandbox. Tasks from other sources need `env.reward`."""

    def __init__(self, task: Task, *, prompt: str = "{question}", full_marks_only: bool = False) -> None:
        """`prompt`: a format string with the task's payload, e.g. `"{metadata[word]}"`. `full_marks_only`: an answer
        scored below 1 earns 0, because partial credit often rewards the wrong thing (for example, a right beginning
        followed by rubbish)."""
        self._entry = task.payload
        self._prompt = _text(prompt)
        self._full_marks_only = full_marks_only
        self._task_id = task.task_id
        dataset = dataset_of(task.payload)
        self._score = rule_of(dataset) if dataset in AUDITED else None

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        try:
            return self._prompt.format_map(self._entry), {}
        except (KeyError, IndexError, ValueError) as error:
            raise TaskError(
                f"env.options.prompt {self._prompt!r} does not fit task {self._task_id}, which has "
                f"{', '.join(self._entry)}: {type(error).__name__} {error}"
            ) from None

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        info = {"expected": self._entry.get("answer")}
        if self._score is None:
            return "", None, True, False, info
        score = float(self._score(action, self._entry))
        return "", float(score == 1.0) if self._full_marks_only else score, True, False, info

    def demonstrate(self) -> str:
        """Return the right answer."""
        return str(self._entry["answer"])


def _text(prompt: object) -> str:
    if not isinstance(prompt, str):
        quoted = """"{question}" in a file, 'env.options.prompt="{question}"' in a shell"""
        raise ConfigError(f"env.options.prompt is {prompt!r}, not text: quote it ({quoted})")
    return prompt
