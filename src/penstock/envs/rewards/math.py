"""Mathematical equality, by math-verify (github.com/huggingface/Math-Verify)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config import ConfigError
from penstock.envs.rewards.reward import field_of


class Math:
    """1 if what the answer ends with (in a box, between dollars, or plain) equals the task's answer, else 0.

    It simplifies what a policy wrote, and a power tower takes for ever: that is worth nothing.
    """

    timeout_reward = 0.0

    def __init__(self, *, answer_key: str = "answer") -> None:
        """`answer_key`: where the task's payload has the right answer, plain or as LaTeX."""
        try:
            import math_verify
        except ImportError:
            raise ConfigError("env.reward math needs the package math-verify: pip install 'penstock[math]'") from None
        self._parse, self._verify = math_verify.parse, math_verify.verify
        self._answer_key = answer_key

    def score(self, answer: str, payload: Mapping[str, Any]) -> float:
        right = str(field_of(payload, self._answer_key))
        expected = self._parse(right) or self._parse(f"${right}$")
        if not expected:
            raise ValueError(f"{self._answer_key} {right!r} is nothing that math-verify can read")
        return float(self._verify(expected, self._parse(answer)))
