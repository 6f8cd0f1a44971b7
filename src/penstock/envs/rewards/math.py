"""A reward for mathematical equality, by math-verify (github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from penstock.config.imports import import_package
from penstock.envs.rewards.reward import field_of

_HAS_MARKS = re.compile(r"\$|\\boxed\b|\\[(\[]")
"""Found in a text that says where its expression is."""
_HAS_PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}(?![^{]*\})")
"""Found in a text with a word outside of braces. In LaTeX its letters would be variables."""


_MARKED = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
"""An expression of a question."""
_NUMBER = re.compile(r"-?[\d.,]+|-?\d+/\d+|-?\\[dt]?frac\{\d+\}\{\d+\}")
"""A number that is worked out."""
MOST_MARKED = 16
"""Most expressions of a question that are compared with an answer."""
UNFINISHED = ("Integral", "Sum", "Product", "Limit", "Derivative")
"""Classes of SymPy for what remains to be worked out."""
OPERATIONS = ("Add", "Mul", "Pow", "Function", *UNFINISHED)

PRECISION = 1e-5
"""Largest relative difference between equal numbers. Math-verify rounds to six decimals, so that 0.0 would equal
Planck's constant."""


class Math:
    """A reward of 1 if the expression that ends the answer equals the task's answer, else 0.

    The expression may be boxed, between dollars, or plain. An expression that only repeats one of the task's `question`
    gives 0 (`23 \\cdot 47` equals 1081), and so does an integral, sum, product, limit or derivative that is not worked
    out, unless the task's answer has one too. Simplifying an expression may take forever, as with a power tower; a
    timeout also gives 0, and so does an answer that makes math-verify fail.
    """

    timeout_reward = 0.0
    part_names: tuple[str, ...] = ()
    reward_range = (0.0, 1.0)
    executes_answers = True

    def __init__(self, *, answer_key: str = "answer") -> None:
        """`answer_key`: key of the right answer in the task's payload. A text without marks of mathematics (`$`,
        `\\boxed`) and without words is read as LaTeX."""
        math_verify = import_package("math_verify", needed_by="env.reward math", install="'penstock[math]'")
        self._parse, self._verify = math_verify.parse, math_verify.verify
        self._answer_key = answer_key

    def score(self, answer: str, payload: Mapping[str, Any]) -> float:
        right, given = self._expected(payload), self._parse(answer)
        if not self._verify(right, given) or _are_apart(right, given):
            return 0.0
        return float(not _is_unfinished(right[0], given[0]) and not self._repeats(right, given, payload))

    def check(self, payload: Mapping[str, Any]) -> None:
        """Raise ValueError if the task's answer cannot be read."""
        self._expected(payload)

    def _repeats(self, right: Sequence[Any], given: Sequence[Any], payload: Mapping[str, Any]) -> bool:
        """Return whether a parsed answer is an expression of the question, and not the task's own answer."""
        text, question = _squeezed(given[-1]), str(payload.get("question", ""))
        if text == _squeezed(right[-1]) or _NUMBER.fullmatch(text):
            return False
        is_compound = _has(given[0], OPERATIONS)
        if text in _squeezed(question) and (is_compound or (_has(given[0], ("Number",)) and not given[0].args)):
            return True
        if not is_compound or given[0] == right[0]:
            return False
        marked = ["".join(found) for found in _MARKED.findall(question)[:MOST_MARKED]]
        form = _form(given[0])
        return any(form == _form(parsed[0]) for each in marked if (parsed := self._parse(f"${each}$")))

    def _expected(self, payload: Mapping[str, Any]) -> Any:
        right = str(field_of(payload, self._answer_key))
        forms = [right, f"${right}$"]
        if not _HAS_MARKS.search(right) and not _HAS_PROSE.search(right):
            forms.reverse()  # as plain text, `5\\sqrt{3}` would be the number 5
        expected = self._parse(forms[0]) or self._parse(forms[1])
        if not expected:
            raise ValueError(f"{self._answer_key} {right!r} cannot be read by math-verify")
        return expected


def _squeezed(text: Any) -> str:
    return "".join(str(text).split())


def _has(expression: Any, names: Sequence[str]) -> bool:
    """Return whether an expression of SymPy, or a part of it, is of one of these classes of SymPy."""
    sympy = import_module("sympy")
    return isinstance(expression, sympy.Basic) and expression.has(*(getattr(sympy, name) for name in names))


def _form(expression: Any) -> Any:
    """Return a value that is the same for expressions that differ only in the order of sums and products."""
    args = getattr(expression, "args", ())
    if not args:
        return repr(expression)
    parts = [_form(each) for each in args]
    name = type(expression).__name__
    return name, *(sorted(parts, key=repr) if name in ("Add", "Mul") else parts)


def _is_unfinished(right: Any, given: Any) -> bool:
    """Return whether an answer has something to work out that the right answer does not have."""
    return any(_has(given, (name,)) and not _has(right, (name,)) for name in UNFINISHED)


def _are_apart(right: Sequence[Any], given: Sequence[Any]) -> bool:
    """Return whether two parsed answers are numbers that differ by more than `PRECISION`."""
    numbers = _number(right[0]), _number(given[0])
    if None in numbers:
        return False
    largest = max(map(abs, numbers))
    return bool(abs(numbers[0] - numbers[1]) > PRECISION * largest)


def _number(expression: Any) -> Any:
    """Return the number that an expression of SymPy means: its value, the right side of an equation, or the only
    element of a set; None if it means none."""
    sympy = import_module("sympy")
    if isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if isinstance(expression, sympy.FiniteSet) and len(expression) == 1:
        (expression,) = expression
    if not isinstance(expression, sympy.Expr) or not expression.is_number:
        return None
    return expression.evalf()
