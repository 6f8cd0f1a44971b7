"""A reward for mathematical equality, by math-verify (github.com/huggingface/Math-Verify)."""

from __future__ import annotations

import math
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
_BETWEEN = re.compile(r"[=<>,;]|\\(?:le|ge|leq|geq|in|to|approx|text|quad)\b")
"""What stands between the parts of an expression."""
_NUMBER = re.compile(r"[-+]?[\d.]+|[-+]?\\[dt]?frac\{(\d+)\}\{(\d+)\}|[-+]?(\d+)/(\d+)")
_UNIT = re.compile(r"(?<=\d)(?:,|\{,\})(?=\d{3})|\\?%|\^\{?\\circ\}?|\\(?:text|mathrm)\{[^}]*\}|\\[!,; ]|\\?\$")
"""What belongs to the notation of a number: commas between thousands, and units."""
_DEMANDS = re.compile(r"\\(?:cup|cap|setminus|binom|max|min|gcd|lcm|det)\b|[vp]matrix")
"""Operations that math-verify works out by itself when it reads an expression."""
_ARITHMETIC = re.compile(r"[\d(](?:[\d\s.+\-*/^×÷·()]{0,200}[\d)])?")
SIGNS = {"**": "^", "*": "\\cdot", "×": "\\cdot", "·": "\\cdot", "÷": "/"}
MOST_PARTS = 16
"""Most parts of a question, and of an answer, that are compared."""
UNFINISHED = ("Integral", "Sum", "Product", "Limit", "Derivative")
"""Classes of SymPy for what remains to be worked out."""

PRECISION = 1e-5
"""Largest relative difference between equal numbers. Math-verify rounds to six decimals, so that 0.0 would equal
Planck's constant."""
PERCENT, LEAST_PERCENT = 100, 1e-3
"""A number of percent equals a number that is so many times as large or as small, unless both are below the second
number: there math-verify's own rounding makes them equal."""


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
        if not given or not self._verify(right, given) or _are_apart(right, given):
            return 0.0
        question = str(payload.get("question", ""))
        return float(not _is_unfinished(right[0], given[0]) and not self._repeats(right, given, question))

    def check(self, payload: Mapping[str, Any]) -> None:
        """Raise ValueError if the task's answer cannot be read."""
        self._expected(payload)

    def _repeats(self, right: Sequence[Any], given: Sequence[Any], question: str) -> bool:
        """Return whether a part of a parsed answer is an expression of the question that remains to be worked out."""
        unmarked = _MARKED.sub(" ", question)
        expressions = [*("".join(found) for found in _MARKED.findall(question)), *map(_as_latex, _sums(unmarked))]
        asked = [part for expression in expressions for part in _parts(expression)][:MOST_PARTS]
        prose, texts = _squeezed(unmarked), set(map(_squeezed, asked))
        forms: list[Any] | None = None
        for part in _parts(str(given[-1]))[:MOST_PARTS]:
            text, tree = _squeezed(part), self._tree(part)
            is_own = text == _squeezed(right[-1]) or (_has_form(tree) and _form(tree) == _form(right[0]))
            if (is_own and not _DEMANDS.search(text)) or _is_worked_out(text, tree):
                continue
            if text in texts or text in prose:
                return True
            forms = [_form(self._tree(each)) for each in asked] if forms is None else forms
            if _has_form(tree) and _form(tree) in forms:
                return True
        return False

    def _tree(self, text: str) -> Any:
        parsed = self._parse(f"${text}$")
        return parsed[0] if parsed else None

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


def _parts(text: str) -> list[str]:
    """Return an expression, and the expressions in it: sides of an equation, elements of a set or a list."""
    inner = text.replace("\\{", " ").replace("\\}", " ").replace("\\left", " ").replace("\\right", " ")
    return list(dict.fromkeys(part.strip() for part in (text, *_BETWEEN.split(inner)) if part.strip()))


def _sums(prose: str) -> list[str]:
    """Return the stretches of a text that are arithmetic."""
    return [found for found in _ARITHMETIC.findall(prose) if not found.strip().isdecimal()]


def _as_latex(arithmetic: str) -> str:
    for sign, command in SIGNS.items():
        arithmetic = arithmetic.replace(sign, f" {command} ")
    return re.sub(r"\^(\d+)", r"^{\1}", arithmetic)


def _is_worked_out(text: str, tree: Any) -> bool:
    """Return whether an expression cannot be worked out any further, or is too small to tell."""
    sympy = import_module("sympy")
    if _NUMBER.fullmatch(text := _UNIT.sub("", text)) and "frac" not in text and "/" not in text:
        return True
    if not isinstance(tree, sympy.Expr):
        return not _DEMANDS.search(text)
    if tree.is_Number:
        found = _NUMBER.fullmatch(text)
        terms = [int(each) for each in (found.groups() if found else ()) if each]
        return found is not None and (not terms or math.gcd(*terms) == 1)
    if _has(tree, UNFINISHED):
        return False
    if tree.free_symbols:
        return bool(tree.count_ops() < 2)
    return bool(_form(tree) == _form(_rebuilt(tree)) or _NUMBER.fullmatch(text))


def _rebuilt(tree: Any) -> Any:
    """Return an expression with all its operations carried out."""
    return tree.func(*map(_rebuilt, tree.args)) if tree.args else tree


def _has(expression: Any, names: Sequence[str]) -> bool:
    """Return whether an expression of SymPy, or a part of it, is of one of these classes of SymPy."""
    sympy = import_module("sympy")
    return hasattr(expression, "has") and bool(expression.has(*(getattr(sympy, name) for name in names)))


def _has_form(tree: Any) -> bool:
    """Return whether the tree shows how an expression is written: a number does not."""
    return bool(getattr(tree, "args", ()))


def _form(expression: Any) -> Any:
    """Return a value that is the same for expressions that differ only in the order of sums and products."""
    args: tuple[Any, ...] = getattr(expression, "args", ())
    if not args:
        return repr(expression)
    parts = [_form(each) for each in args]
    name = type(expression).__name__
    if name == "Pow" and parts[1] == "-1" and parts[0].isdecimal():
        return f"1/{parts[0]}"  # as SymPy writes a fraction that it has carried out
    return name, *(sorted(parts, key=repr) if name in ("Add", "Mul") else parts)


def _is_unfinished(right: Any, given: Any) -> bool:
    """Return whether an answer has something to work out that the right answer does not have."""
    return any(_has(given, (name,)) and not _has(right, (name,)) for name in UNFINISHED)


def _are_apart(right: Sequence[Any], given: Sequence[Any]) -> bool:
    """Return whether two parsed answers that math-verify finds equal are numbers that differ by more than
    `PRECISION`, and not by percent."""
    one, other = _number(right[0]), _number(given[0])
    if one is None or other is None:
        return False
    pairs = [(one, other)]
    if max(_size(one), _size(other)) >= LEAST_PERCENT:
        pairs += [(PERCENT * one, other), (one, PERCENT * other)]
    return all(_size(a - b) > PRECISION * max(_size(a), _size(b)) for a, b in pairs)


def _size(number: Any) -> Any:
    return abs(number).evalf()


def _number(expression: Any) -> Any:
    """Return the finite number that an expression of SymPy means: its value, the right side of an equation, or the only
    element of a set; None if it means none."""
    sympy = import_module("sympy")
    if isinstance(expression, sympy.Eq):
        expression = expression.rhs
    if isinstance(expression, sympy.FiniteSet) and len(expression) == 1:
        (expression,) = expression
    if not isinstance(expression, sympy.Expr) or not expression.is_number:
        return None
    value = expression.doit().evalf()
    return value if (_size(value).is_Float and _size(value).is_finite) or value.is_zero else None
