"""A tokenizer of bytes: everything can be said and shown as it is. For players that are no model."""

from __future__ import annotations

from jinja2 import Template
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import ASSISTANT, CHAT_TEMPLATE, END, USER


def byte_tokenizer() -> ChatTokenizer:
    """One token per byte, and the tiny policy's chat template."""
    special = (USER, ASSISTANT, END)
    vocabulary = {token: number for number, token in enumerate((*special, *sorted(ByteLevel.alphabet())))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return ChatTokenizer(tokenizer, Template(CHAT_TEMPLATE), {"eos_token": END}, (vocabulary[END],))
