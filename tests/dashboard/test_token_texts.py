"""The texts of tokens join to the text of all, for any tokens of any tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_with_groups import chat
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from penstock.dashboard.token_texts import token_texts
from penstock.model.chat import byte_level, byte_tokenizer


def merging() -> Tokenizer:
    """A byte-level tokenizer with tokens that end in the middle of characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {each: number for number, each in enumerate(alphabet)}
    merges = [(a, b) for text in ("é水🙂", "né") for a, b in _pairs(text)]
    for a, b in merges:
        words.setdefault(a + b, len(words))
    tokenizer = Tokenizer(BPE(vocab=words, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pairs(text: str) -> list[tuple[str, str]]:
    ((spelled, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [(spelled[at], spelled[at + 1]) for at in range(0, len(spelled) - 1, 3)]


def pieces() -> Tokenizer:
    """A tokenizer that drops the space before the first word (Llama 2)."""
    tokenizer = Tokenizer(WordLevel({"▁a": 0, "b": 1, "▁c": 2, "▁": 3, "<unk>": 4}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TOKENIZERS = {"bytes": byte_level(("<s>",)), "merges": merging(), "words": pieces()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_token_texts_join_to_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=60))
    check(lambda each: tokenizer.decode(list(each), skip_special_tokens=False), ids)


@given(st.text(max_size=40))
def test_the_tokens_of_a_text_join_to_the_text(text: str) -> None:
    words = byte_tokenizer()
    ids = words.encode(text)
    assert "".join(check(lambda each: words.decode(each, skip_special=False), ids)) == text


@given(st.lists(st.integers(0, 99), max_size=60))
def test_the_tiny_policy(ids: list[int]) -> None:
    check(lambda each: chat().decode(each, skip_special=False), ids)


def test_a_character_of_several_tokens_is_the_text_of_the_last() -> None:
    words = byte_tokenizer()
    texts = check(lambda each: words.decode(each, skip_special=False), words.encode("a水b"))
    assert texts == ["a", "", "", "水", "b"]


def check(decode: object, ids: Sequence[int]) -> list[str]:
    assert callable(decode)
    texts = token_texts(decode, ids)
    assert len(texts) == len(ids) and "".join(texts) == (decode(ids) if ids else "")
    return texts
