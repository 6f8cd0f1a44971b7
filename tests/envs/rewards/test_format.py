"""The form of an answer, whatever it says."""

import pytest

from penstock.config import ConfigError
from penstock.envs.rewards.format import Format


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("<think>so</think><answer>4</answer>", 1.0),
        ("\n<think>so\nor so</think>\n\n<answer>4</answer>\n", 1.0),
        ("<think> </think><answer>4</answer>", 0.0),
        ("<answer>4</answer><think>so</think>", 0.0),
        ("<think>so</think><answer>4</answer><answer>5</answer>", 0.0),
        ("<think>so</think> Well: <answer>4</answer>", 0.0),
        ("<think>so</think><answer>4", 0.0),
        ("<think>so <answer>4</think></answer>", 0.0),
        ("4", 0.0),
    ],
)
def test_tags(answer: str, reward: float) -> None:
    assert Format(tags=["think", "answer"]).score(answer, {}) == reward


@pytest.mark.parametrize(("answer", "reward"), [("so\nit is 42", 1.0), ("it is 42.", 0.0)])
def test_a_pattern_is_for_the_whole_answer(answer: str, reward: float) -> None:
    assert Format(pattern=r".*\d+").score(answer, {}) == reward


@pytest.mark.parametrize("options", [{}, {"tags": ["a"], "pattern": "b"}, {"pattern": "("}])
def test_what_asks_for_nothing_or_cannot_be_read_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"env\.reward"):
        Format(**options)  # type: ignore[arg-type]
