"""Text that grows with its tokens, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from penstock.rollout.text import LONGEST_CHARACTER, GrowingText, Stops

TEXT = "grüße, 水 und 🙂!"


class Bytes:
    """A tokenizer: one token per byte."""

    longest_token = 1

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


class Words:
    """A tokenizer whose words bring their own spaces, but for the first."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "▁c": 2}, unk_token="▁a"))
        self._tokenizer.decoder = decoders.Metaspace()
        self.longest_token = 2

    def encode(self, text: str) -> list[int]:
        return ["abc".index(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids)))


@given(st.lists(st.integers(0, 4), min_size=1))
def test_text_only_grows_and_shows_no_half_character(sizes: list[int]) -> None:
    ids, growing, place, seen = Bytes().encode(TEXT), GrowingText(Bytes()), 0, ""
    for size in [*sizes, len(ids)]:
        text = growing.add(ids[place : place + size])
        place += size
        assert text.startswith(seen) and TEXT.startswith(text)
        seen = text
    assert seen == TEXT


@given(st.binary(min_size=1, max_size=60), st.integers(1, 7))
def test_bytes_that_are_no_text_come_out_as_they_are_decoded_at_once(content: bytes, size: int) -> None:
    growing, ids = GrowingText(Bytes()), list(content)
    for start in range(0, len(ids), size):
        text = growing.add(ids[start : start + size])
    whole = Bytes().decode(ids)
    assert whole.startswith(text) and len(whole) - len(text) <= 2 * LONGEST_CHARACTER


def test_an_answer_of_bytes_that_are_no_text_costs_no_more_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = 0

    class Counting(Bytes):
        def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
            nonlocal decoded
            decoded += len(token_ids)
            return super().decode(token_ids)

    growing = GrowingText(Counting())
    for _ in range(2000):
        growing.add([0xFF])
    assert decoded < 2000 * 100


def test_spaces_that_depend_on_what_came_before_stay() -> None:
    growing = GrowingText(Words())
    for token in (0, 1, 2, 0):
        growing.add([token])
        assert growing.add([]) == growing.text
    assert growing.text == "a b c a"


@pytest.mark.parametrize(
    ("text", "without_partial_stop", "cut"),
    [("hello E", "hello ", "hello E"), ("hello END x", "hello END x", "hello "), ("EN", "", "EN")],
)
def test_a_stop_string_takes_nothing_back(text: str, without_partial_stop: str, cut: str) -> None:
    stops = Stops(strings=("END",))
    assert (stops.without_partial_stop(text), stops.cut(text)) == (without_partial_stop, cut)


def test_a_stop_string_is_seen_whatever_tokens_spell_it() -> None:
    stops = Stops(strings=("🙂", "never"))
    ids = Bytes().encode("oh 🙂")
    assert [stops.end(Bytes(), ids[:length]) for length in range(1, len(ids) + 1)] == [False] * (len(ids) - 1) + [True]
