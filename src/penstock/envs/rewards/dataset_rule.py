"""A reward by the rule of the task's reasoning-gym dataset, and the rules that may see an answer outside a sandbox."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from typing import Any

from penstock.config import EnvironmentConfig, TagConfig
from penstock.config.environments import SINGLE_TURN
from penstock.config.imports import import_package

NAME = "reasoning_gym"
COIN_FLIP_TOLERANCE, COIN_FLIP_SHARE = Fraction(1, 10_000), Fraction(1, 1000)
"""Largest difference for which the rule of `coin_flip` gives full marks, and largest share of the probability: many
heads in a row are so rare that 0 would be near enough."""
ARITHMETIC = re.compile(r"[0-9\s()*/+-]+")
"""Characters of an expression of whole numbers and the four operators."""
POLYNOMIAL = re.compile(r"[A-Za-z0-9\s()*/+-]+")
CALL = re.compile(r"[A-Za-z]\s*\(|[A-Za-z]{2}")
"""A name before a parenthesis, or one of several letters: SymPy would compute the product that the task asks for."""
NAME_IN_FORMULA = re.compile(r"[^\W\d]\w*")
SYMBOL = re.compile(r"[A-Za-z]_?[0-9]*")
FUNCTIONS = frozenset(
    """
    abs Abs acos acosh acot acoth acsc acsch asec asech asin asinh atan atanh cbrt cos cosh cot coth csc csch exp ln log
    pi sec sech sign sin sinh sqrt tan tanh
    """.split()  # noqa: SIM905
)
"""Names in a formula, besides symbols, that neither integrate nor evaluate text."""
EVALUATING = frozenset("NOQS")
"""Symbols that SymPy takes for functions."""
FIRST_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})
"""Datasets with rules that need `metadata.output` as a tuple of tuples. A message turns tuples into lists."""
AUDITED = frozenset(
    """
    ab acre aiw arc_1d base_conversion basic_arithmetic bf binary_alternation caesar_cipher count_bits count_primes
    course_schedule gcd isomorphic_strings largest_island lcm leg_counting letter_counting list_functions mahjong_puzzle
    maze modulo_grid number_filtering number_sequence ransom_note rotate_matrix rotten_oranges simple_equations
    simple_geometry spell_backward string_manipulation string_splitting string_synthesis syllogism
    word_sequence_reversal
    """.split()  # noqa: SIM905
)
"""Datasets with rules that only compare the answer's characters with the expected ones, in time linear in the answer's
length (which the token limits bound). `tests/security/test_audited_rules.py` reads their source. They score on the
event loop; all others execute or parse the answer, or might, and score in a sandbox."""


class DatasetRule:
    """The reward that the task's reasoning-gym dataset gives to an answer. Many of these rules execute the answer as
    Python, or hang or fail on some. An answer that makes a rule fail, hang or end its process earns 0."""

    timeout_reward = 0.0
    part_names: tuple[str, ...] = ()
    reward_range = (0.0, 1.0)
    executes_answers = True

    def __init__(self, *, full_marks_only: bool = False) -> None:
        """`full_marks_only`: a score below 1 becomes 0."""
        self._full_marks_only = full_marks_only
        import_package("reasoning_gym", needed_by=f"env.reward {NAME}", install="'penstock[tasks]'")

    def score(self, answer: str, payload: Mapping[str, Any]) -> float:
        rule, payload = _rule(payload), _with_tuples(payload)
        try:
            score = 0.0 if _is_overpaid(answer, payload) else float(rule(answer, payload))
        except Exception:  # some rules raise whatever their parser raises
            return 0.0
        return float(score == 1.0) if self._full_marks_only else score

    def check(self, payload: Mapping[str, Any]) -> None:
        """Raise ValueError if no rule scores the task."""
        _rule(payload)


def _with_tuples(payload: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the payload as the rule of its dataset needs it: see `COMPARES_TUPLES`."""
    if dataset_of(payload) not in COMPARES_TUPLES:
        return payload
    metadata = payload["metadata"]
    return {**payload, "metadata": {**metadata, "output": tuple(map(tuple, metadata["output"]))}}


def _is_overpaid(answer: str, payload: Mapping[str, Any]) -> bool:
    """Return whether an answer is wrong, for the datasets with a rule that pays for wrong answers: any text instead of
    `True`, an empty grid where most cells are empty, a number of the wrong sign, the first digit of a probability,
    the first decimals of a number, `nan` as a number, numbers that the task does not give, and a repeated question."""
    match dataset_of(payload):
        case "game_of_life_halting":
            return answer.strip().casefold() != str(payload["answer"]).casefold()
        case "game_of_life":
            return bool(json.loads(answer) != json.loads(payload["answer"]))
        case "gsm_symbolic":
            found = FIRST_NUMBER.search(answer)
            return found is not None and float(found[0]) != float(payload["answer"])
        case "coin_flip":
            right = Fraction(str(payload["answer"]))
            difference = abs(Fraction(answer.replace(",", "")) - right)
            return difference > min(COIN_FLIP_TOLERANCE, COIN_FLIP_SHARE * right)
        case "decimal_arithmetic":
            exact = Decimal(str(payload["answer"]))
            return abs(Decimal(answer) - exact) > Decimal((0, (1,), int(exact.as_tuple().exponent)))
        case "complex_arithmetic":
            return any(word in answer.casefold() for word in ("nan", "inf"))
        case "number_sorting":
            return _numbers(answer) != _numbers(payload["answer"])
        case "puzzle24":
            return not _is_arithmetic(answer) or not _makes_24(answer, payload["metadata"]["numbers"])
        case "countdown":
            return not _is_arithmetic(answer)
        case "prime_factorization":
            return "×" in payload["answer"] and _has_trivial_factor(answer, payload["metadata"]["number"])
        case "polynomial_multiplication":
            return not POLYNOMIAL.fullmatch(answer) or CALL.search(answer) is not None
        case "simple_integration" | "intermediate_integration":
            return not _is_formula(answer)
    return False


def _numbers(answer: str) -> list[float]:
    return [float(each) for each in json.loads(answer.replace("'", '"'))]


def _is_arithmetic(answer: str) -> bool:
    """Return whether an answer has only whole numbers and the four operators. The rules see no number in `0x18`, and
    read `/ /` as `//`."""
    joined = "".join(answer.split())
    return bool(ARITHMETIC.fullmatch(answer)) and "**" not in joined and "//" not in joined


def _makes_24(answer: str, numbers: Sequence[int]) -> bool:
    """Return whether an answer uses each of `numbers` once and is exactly 24. The rule cuts fractions off."""
    if sorted(map(int, re.findall("[0-9]+", answer))) != sorted(numbers):
        return False
    return bool(import_module("sympy").parse_expr(answer.strip()) == 24)


def _has_trivial_factor(answer: str, number: int) -> bool:
    return not all(1 < int(factor) < number for factor in answer.split("×") if factor.strip())


def _is_formula(answer: str) -> bool:
    """Return whether an answer has only symbols and functions, and no call that stands for the integral."""
    symbols = set(NAME_IN_FORMULA.findall(answer)) - FUNCTIONS
    has_only_symbols = all(SYMBOL.fullmatch(each) and each not in EVALUATING for each in symbols)
    return has_only_symbols and not any(quote in answer for quote in "\"'")


def _rule(payload: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], float]:
    dataset = dataset_of(payload)
    if dataset is None:
        raise ValueError("the task is not of reasoning-gym: it has no metadata.source_dataset")
    return rule_of(dataset)


@functools.cache
def rule_of(dataset: str) -> Callable[[str, Mapping[str, Any]], float]:
    """Return the function of a dataset that scores answers. Raises ValueError if there is no such dataset."""
    reasoning_gym = import_package("reasoning_gym", needed_by=f"the rule of {dataset}", install="'penstock[tasks]'")
    if dataset not in import_module("reasoning_gym.factory").DATASETS:
        raise ValueError(f"metadata.source_dataset of a task: reasoning-gym has no dataset {dataset}")
    score: Callable[[str, Mapping[str, Any]], float] = reasoning_gym.get_score_answer_fn(dataset)
    return score


def dataset_of(payload: Mapping[str, Any]) -> str | None:
    """Return the name of the reasoning-gym dataset that a task comes from; None if it comes from elsewhere. Raises
    ValueError if it is no text."""
    dataset = _given_dataset(payload)
    if dataset is not None and not isinstance(dataset, str):
        raise ValueError(f"metadata.source_dataset of a task is {str(dataset)[:80]}, not text")
    return dataset


def _given_dataset(payload: Mapping[str, Any]) -> Any:
    metadata = payload.get("metadata")
    return metadata.get("source_dataset") if isinstance(metadata, Mapping) else None


def is_scored_apart(settings: EnvironmentConfig, payload: Mapping[str, Any]) -> bool:
    """Return whether this reward scores a task of an environment that leaves the reward to its dataset."""
    is_left = settings.name == SINGLE_TURN and settings.reward is None
    return is_left and _given_dataset(payload) not in (None, *AUDITED)  # `DatasetRule.check` refuses a wrong one


def unaudited_of(settings: TagConfig) -> list[str]:
    """Return the datasets of an environment with rules that need a sandbox."""
    data = settings.data
    if settings.name != SINGLE_TURN or settings.reward is not None or data.source != "reasoning_gym":
        return []
    mixed = data.options.get("datasets")
    parts = mixed if data.dataset == "composite" and isinstance(mixed, list) else [{"name": data.dataset}]
    names = [str(part.get("name") if isinstance(part, Mapping) else getattr(part, "name", part)) for part in parts]
    return [name for name in names if name not in AUDITED]
