"""What is shown when a run has ended."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.observe.closing_report import LONGEST_CELL, common_beginning, sample_table


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


QUESTION = "Spell this word backward (example: sun -> nus): "


def test_what_all_prompts_begin_with_is_shown_once() -> None:
    samples = [
        {"prompt": QUESTION + word, "expected": word[::-1], "answer": word, "reward": 0.0} for word in ("abba", "abbot")
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(sample_table(samples, samples))
    lines = console.export_text().splitlines()
    assert lines[0].rstrip() == f"held-out tasks: {QUESTION}…"
    assert [line.split()[:2] for line in lines[2:]] == [["abba", "abba"], ["abbot", "tobba"]]


def test_only_whole_words_are_taken_for_a_common_beginning() -> None:
    assert common_beginning([QUESTION + "abba", QUESTION + "abbot"]) == QUESTION
    assert common_beginning([QUESTION + "abba"]) == "" and common_beginning(["a b", "a c"]) == ""
