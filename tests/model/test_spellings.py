"""The pattern of many words finds what a list of them would."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from penstock.model.spellings import Spellings, any_of

TEXT = st.text("ab<>", max_size=12)


@given(st.sets(st.text("ab<>", min_size=1, max_size=5), max_size=12), TEXT)
def test_the_longest_word_at_each_place_is_found(words: set[str], text: str) -> None:
    listed = "|".join(re.escape(word) for word in sorted(words, key=lambda word: (-len(word), word)))
    assert any_of(words).split(text) == re.split(f"({listed or '(?!)'})", text)


@given(st.sets(st.text("ab<>", min_size=1, max_size=5), max_size=12), TEXT)
def test_a_text_with_a_word_might_spell_it(words: set[str], text: str) -> None:
    if any(word in text.strip() for word in words):
        assert Spellings(words).might_be_in(text)


def test_words_of_any_length_and_number_make_a_pattern() -> None:
    nested = ["a" * length for length in range(1, 1500)]
    assert any_of(nested).fullmatch("a" * 1499)
    assert any_of(["x" * 5000]).search("y" + "x" * 5000)


def test_thousands_of_words_are_searched_in_few_steps() -> None:
    """Each place of the text is compared with the next characters of the words, not with each word."""
    pattern = any_of([f"<unused{number}>" for number in range(6000)]).pattern
    assert pattern.count("unused") == 1
