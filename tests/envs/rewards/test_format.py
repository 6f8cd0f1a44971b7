"""The form of an answer, whatever it says."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        ("<think>so</answer></think><answer>4", 0.0),
        ("4", 0.0),
    ],
)
def test_tags(answer: str, reward: float) -> None:
    assert Format(tags=["think", "answer"]).score(answer, {}) == reward


def means(tags: list[str], answer: str) -> bool:
    """What tags mean, as a regular expression, which takes too long for long answers."""
    once = all(answer.count(mark) == 1 for tag in tags for mark in (f"<{tag}>", f"</{tag}>"))
    pattern = r"\s*".join(rf"<{re.escape(tag)}>.*\S.*</{re.escape(tag)}>" for tag in tags)
    return once and re.fullmatch(rf"\s*{pattern}\s*", answer, re.DOTALL) is not None


TAGS = ["a", "b", "/a"]
PIECES = st.sampled_from(
    [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")] + ["x", " ", "\n", "\x1f", "\u2003", "<"]
)
"""Marks, text, and characters that count as whitespace."""


@st.composite
def almost_in_form(draw: st.DrawFn) -> tuple[list[str], str]:
    """Return tags, and an answer in their form with pieces replaced, added and removed."""
    tags = draw(st.lists(st.sampled_from(TAGS), min_size=1, max_size=3))
    pieces = [piece for tag in tags for piece in (f"<{tag}>", "x", f"</{tag}>", " ")]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(pieces)))
        pieces[at : at + draw(st.integers(0, 1))] = draw(st.lists(PIECES, max_size=1))
    return tags, "".join(pieces)


@given(almost_in_form())
def test_tags_mean_a_regular_expression(example: tuple[list[str], str]) -> None:
    tags, answer = example
    assert Format(tags=tags).score(answer, {}) == means(tags, answer)


def test_a_long_wrong_answer_takes_no_time() -> None:
    inside = "so we add the numbers and get it. " * 30_000
    answer = f"<think>{inside}</think><answer>{'x' * 100_000}</answer>"
    started = time.process_time()
    assert Format(tags=["think", "answer"]).score(answer, {}) == 1.0
    assert Format(tags=["think", "answer"]).score(f"{answer} bye", {}) == 0.0
    assert time.process_time() - started < 0.5


@pytest.mark.parametrize(("answer", "reward"), [("so\nit is 42", 1.0), ("it is 42.", 0.0)])
def test_a_pattern_is_for_the_whole_answer(answer: str, reward: float) -> None:
    assert Format(pattern=r".*\d+").score(answer, {}) == reward


@pytest.mark.parametrize("options", [{}, {"tags": ["a"], "pattern": "b"}, {"pattern": "("}])
def test_what_asks_for_nothing_or_cannot_be_read_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"env\.reward"):
        Format(**options)  # type: ignore[arg-type]
