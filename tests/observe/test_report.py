"""What is shown when a run has ended."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.observe.report import LONGEST_CELL, sample_table


def shown(prompt: str, answer: str, *, width: int, expected: str = "ba") -> str:
    sample = {"prompt": prompt, "expected": expected, "answer": answer, "reward": 0.5}
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(sample_table([sample], [sample]))
    return console.export_text()


def test_samples_are_folded_and_not_cut() -> None:
    prompt = "Spell this word backward (example: sun -> nus): encyclopaedia"
    text = shown(prompt, "aideapolcycne", width=70)
    assert all(word in text for word in prompt.split())
    assert "…" not in text


def test_a_very_long_answer_loses_its_middle() -> None:
    text = "".join(shown("ab", "first " + "x" * 10 * LONGEST_CELL + " last", width=2000).split())
    assert "first" in text and "last" in text and "…" in text
    assert text.count("x") < 3 * LONGEST_CELL


def test_what_is_expected_is_a_column_only_where_somebody_knows() -> None:
    assert "expected" in shown("ab", "ba", width=70)
    assert "expected" not in (text := shown("ab", "ba", width=70, expected="")) and "∅" not in text
