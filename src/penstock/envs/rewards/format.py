"""A reward for the form of an answer, independent of its content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import ConfigError


class Format:
    """A reward of 1 if the answer has the required form, else 0."""

    timeout_reward = 0.0

    def __init__(self, *, tags: Sequence[str] = (), pattern: str | None = None) -> None:
        """`tags`: names of tags like `think` for `<think>...</think>`. Each must occur exactly once, in this order, and
        not be empty; only whitespace may stand outside them. `pattern`: a regular expression for the whole answer,
        where `.` also matches line breaks. Raises `ConfigError` unless exactly one of the two is given."""
        if bool(tags) == (pattern is not None):
            raise ConfigError("env.reward format needs env.reward_options tags or pattern, and not both")
        try:
            self._form = re.compile(pattern if pattern is not None else _pattern_of(tags), re.DOTALL)
        except re.error as error:
            raise ConfigError(f"env.reward_options pattern {pattern!r}: {error}") from None
        self._marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]

    def score(self, answer: str, payload: Mapping[str, Any]) -> float:
        once = all(answer.count(mark) == 1 for mark in self._marks)
        return float(once and self._form.fullmatch(answer) is not None)


def _pattern_of(tags: Sequence[str]) -> str:
    return r"\s*" + r"\s*".join(rf"<{re.escape(tag)}>.*\S.*</{re.escape(tag)}>" for tag in tags) + r"\s*"
