"""A reward for the form of an answer, independent of its content."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import ConfigError


class Format:
    """A reward of 1 if the answer has the required form, else 0."""

    timeout_reward = 0.0
    part_names: tuple[str, ...] = ()
    confined = False

    def __init__(self, *, tags: Sequence[str] = (), pattern: str | None = None) -> None:
        """`tags`: names of tags like `think` for `<think>...</think>`. Each must occur exactly once, in this order, and
        not be empty; only whitespace may stand outside them. `pattern`: a regular expression for the whole answer,
        where `.` also matches line breaks. Raises `ConfigError` unless exactly one of the two is given."""
        if bool(tags) == (pattern is not None):
            raise ConfigError("env.reward format needs env.reward_options tags or pattern, and not both")
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"env.reward_options pattern {pattern!r}: {error}") from None
        self._marks = [(f"<{tag}>", f"</{tag}>") for tag in tags]

    def score(self, answer: str, payload: Mapping[str, Any]) -> float:
        if self._pattern is not None:
            return float(self._pattern.fullmatch(answer) is not None)
        return float(_has_form(answer, self._marks))


def _has_form(answer: str, marks: Sequence[tuple[str, str]]) -> bool:
    """Return whether an answer has the form of its tags, in time linear in its length, also if it is wrong."""
    rest = answer
    for opening, closing in marks:
        before, _, rest = rest.partition(opening)
        inside, end, rest = rest.partition(closing)
        once = answer.count(opening) == answer.count(closing) == 1
        if before.strip() or not inside.strip() or not end or not once:
            return False
    return not rest.strip()
