"""The rules that see answers outside a sandbox: their source does nothing but compare characters."""

from __future__ import annotations

import ast
import inspect
import textwrap

import pytest

from penstock.envs.rewards.dataset_rule import AUDITED

factory = pytest.importorskip("reasoning_gym.factory")

CALLS = {"isinstance", "len", "range", "lower"}
"""All that an audited rule may call. Each takes time linear in the answer's length, and none parses."""


def calls_of(function: object) -> set[str]:
    """Return the names of what a function calls. Everything that is no plain name counts by its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    return {
        node.func.id
        if isinstance(node.func, ast.Name)
        else node.func.attr
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        else ast.unparse(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }


def costs_of(function: object) -> list[str]:
    """Return the parts of a function's source whose cost may grow faster than the answer."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))  # type: ignore[arg-type]
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For | ast.While | ast.comprehension)]
    nested = [each for node in loops for each in ast.walk(node) if each is not node and each in loops]
    endless = [node for node in loops if isinstance(node, ast.While)]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Lambda)]
    powers = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Pow | ast.Mult | ast.LShift | ast.Mod)
    ]
    return [ast.unparse(node) for node in (*nested, *endless, *imports, *powers)]


@pytest.mark.parametrize("name", sorted(AUDITED))
def test_an_audited_rule_only_compares(name: str) -> None:
    rule = factory.DATASETS[name][0].score_answer
    assert calls_of(rule) <= CALLS
    assert costs_of(rule) == []


@pytest.mark.parametrize(
    "name", ["countdown", "puzzle24", "polynomial_multiplication", "string_insertion", "n_queens", "chain_sum"]
)
def test_a_rule_that_parses_would_be_noticed(name: str) -> None:
    assert name not in AUDITED
    assert calls_of(factory.DATASETS[name][0].score_answer) - CALLS


def test_the_quickstart_needs_no_sandbox() -> None:
    assert "spell_backward" in AUDITED
