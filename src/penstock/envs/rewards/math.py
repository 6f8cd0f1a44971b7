"""A reward for mathematical equality, by math-verify (github.com/huggingface/Math-Verify)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config.imports import import_package
from penstock.envs.rewards.reward import field_of


class Math:
    """A reward of 1 if the expression that ends the answer equals the task's answer, else 0.

    The expression may be boxed, between dollars, or plain. Simplifying it may take forever, as with a power tower; a
    timeout also gives 0.
    """

    timeout_reward = 0.0

    def __init__(self, *, answer_key: str = "answer") -> None:
        """`answer_key`: key of the right answer in the task's payload, plain or as LaTeX."""
        math_verify = import_package("math_verify", needed_by="env.reward math", install="'penstock[math]'")
        self._parse, self._verify = math_verify.parse, math_verify.verify
        self._answer_key = answer_key

    def score(self, answer: str, payload: Mapping[str, Any]) -> float:
        right = str(field_of(payload, self._answer_key))
        expected = self._parse(right) or self._parse(f"${right}$")
        if not expected:
            raise ValueError(f"{self._answer_key} {right!r} cannot be read by math-verify")
        return float(self._verify(expected, self._parse(answer)))
