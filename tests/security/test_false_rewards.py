"""Answers that earned a full reward although they were wrong, and right ones that earned none."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.envs.rewards.dataset_rule import DatasetRule


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (r"5\sqrt{3}", "5"),
        (r"2^{2019}-1", "2"),
        (r"10\pi", "10"),
        ("3x", "3"),
        ("1,2,3", "1.2"),
        (r"(-\infty, 3)", "3"),
        (r"\frac{\pi}{4}", "4"),
        ("x^2-3x+2", "2"),
        ("1/2", "1"),
        ("12", "1"),
        (r"\boxed{\frac{3}{4}}", "3"),
        ("The answer is 12", "2"),
    ],
)
def test_a_right_answer_of_latex_is_read_as_a_whole(right: str, wrong: str) -> None:
    pytest.importorskip("math_verify")
    from penstock.envs.rewards.math import Math

    reward, payload = Math(), {"answer": right}
    for form in (f"The answer is {wrong}", rf"\boxed{{{wrong}}}"):
        assert reward.score(form, payload) == 0.0
    expression = right.removeprefix(r"\boxed{").removesuffix("}") if right.startswith(r"\boxed") else right
    assert reward.score(f"${expression.rpartition('is ')[2]}$", payload) == 1.0


@pytest.mark.parametrize(
    ("dataset", "wrong"), [("game_of_life_halting", "x"), ("coin_flip", "0"), ("complex_arithmetic", "nan")]
)
def test_a_mistaken_rule_pays_only_right_answers(dataset: str, wrong: str) -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym")
    reward = DatasetRule()
    for task in reasoning_gym.create_dataset(dataset, seed=11, size=8):
        payload: dict[str, Any] = task
        assert reward.score(wrong, payload) < 1.0
        assert reward.score(str(payload["answer"]), payload) == 1.0
