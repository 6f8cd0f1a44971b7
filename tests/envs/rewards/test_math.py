"""math-verify itself, on what policies write."""

import pytest

from penstock.envs.rewards.math import Math

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("answer", "right", "reward"),
    [
        ("The answer is 42.", "42", 1.0),
        ("So we get $\\boxed{\\frac{2}{4}}$.", "1/2", 1.0),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        ("It is \\boxed{41}", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        ("\\boxed{" * 50, "42", 0.0),
        ("1,000", "1000", 1.0),
    ],
)
def test_equal_is_what_is_equal(answer: str, right: str, reward: float) -> None:
    assert Math().score(answer, {"answer": right}) == reward


def test_a_task_without_an_answer_is_named() -> None:
    with pytest.raises(ValueError, match="the task has no 'answer': it has question, solution"):
        Math().score("4", {"question": "2+2", "solution": "4"})
    assert Math(answer_key="solution").score("4", {"solution": 4}) == 1.0
