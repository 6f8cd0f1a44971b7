"""Chat templates and tokenization without torch: jinja2 renders, `tokenizers` encodes.

The history is never tokenized twice: an episode keeps its token ids, and requests only the tokens that new messages
add (`continuation`). The rendered text equals that of Hugging Face's `apply_chat_template`, and so do its tokens,
except that text of messages, tools and settings never becomes a control token. Works for any directory with a
tokenizer.json.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from penstock.model.answer_format import AUTO, THOUGHT_ENDS, AnswerFormat
from penstock.model.chat_template import ChatTemplate, read_template
from penstock.model.control_tokens import ControlTokens, Real
from penstock.model.files import AGAIN, ModelError, check_links, read_json, read_json_if_present
from penstock.model.tiny import ASSISTANT, CHAT_TEMPLATE, END, USER
from penstock.sendable import encodable

SENTINEL = f"penstock{secrets.token_hex(16)}"
"""Placeholder text of a turn, used to find the text that the template puts around such a turn. No text can guess it."""


class ChatTokenizer:
    """The tokenizer and the chat template of a model directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        specials: Mapping[str, str],
        eos_ids: tuple[int, ...],
        *,
        tool_format: str = AUTO,
    ) -> None:
        """`tool_format`: see `AnswerFormat.of`."""
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(specials)
        self.eos_ids = eos_ids
        self._controls = ControlTokens(tokenizer, template, eos_ids)
        self.answers = AnswerFormat.of(template.source if template is not None else "", tool_format)
        """How to read answers."""
        self._marks = _special_marks(tokenizer, self.answers)
        self.max_characters = math.inf
        """Maximum length of a rendered conversation. A longer one is refused before it is tokenised."""
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, model_dir: Path, *, tool_format: str = AUTO) -> ChatTokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of `model_dir`."""
        check_links(model_dir)
        config = read_json(model_dir, "tokenizer_config.json")
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"model directory {model_dir} has no tokenizer.json")
        try:
            with without_panic():
                tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exception for every malformed file
            raise ModelError(f"{path} cannot be read ({error}): {AGAIN}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special_tokens = _special_tokens(model_dir, config)
        eos_ids = _eos_ids(model_dir, tokenizer, special_tokens)
        template = read_template(model_dir, config)
        chat = cls(tokenizer, template, special_tokens, eos_ids, tool_format=tool_format)
        if chat._template is not None:
            try:
                chat.render([{"role": "user", "content": "-"}])
            except ModelError as error:
                raise ModelError(f"{error}: correct the chat template of {model_dir}") from None
        return chat

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, must_call: str | None = None, **settings: Any
    ) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's next turn.

        `must_call`: see `begun_call`. `settings` (`tools`, ...) are passed to the template.
        """
        return self.begun_call(self._encode(*self._render(messages, settings)), must_call)

    def begun_call(self, prompt_ids: list[int], tool: str | None) -> list[int]:
        """Return the prompt, followed by the beginning of a tool call.

        `tool` is the name of the tool, or empty for any tool. With None, the prompt stays as it is. If the prompt ends
        with `<think>`, the thought ends before the call. Raises ValueError if the model's format does not allow it.
        """
        if tool is None:
            return prompt_ids
        ended = THOUGHT_ENDS if self.answers.is_thinking(prompt_ids, self.decode) else ""
        return prompt_ids + self.encode(ended + self.answers.beginning(tool))

    def continuation(self, messages: Sequence[Mapping[str, Any]], *, ended: bool, **settings: Any) -> list[int]:
        """Return the tokens between two assistant turns, with `messages` between them.

        `ended`: the generated turn already ends with an end-of-turn token, which is then not repeated.
        """
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": SENTINEL}, *messages]
        text, real = self._render(turn, settings)
        place = text.translate(real).find(SENTINEL) if real else text.find(SENTINEL)
        if place < 0:
            raise ModelError("the chat template drops the assistant's text: use a template that keeps it")
        token_ids = self._encode(text[place + len(SENTINEL) :], real)
        return token_ids[1:] if ended and token_ids and token_ids[0] in self.eos_ids else token_ids

    def render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """Return the text of a conversation, up to the start of the assistant's next turn."""
        text, real = self._render(messages, settings)
        return text.translate(real) if real else text

    def _render(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> tuple[str, Real]:
        """Return the text of a conversation, in which text that might spell a control token is disguised."""
        if self._template is None:
            raise ModelError("no chat template: add chat_template.jinja, or `chat_template` in tokenizer_config.json")
        template, known = self._template, {"add_generation_prompt": True, **self._special_tokens}
        disguised, hidden, real = self._controls.disguised(messages, settings)
        text = template.render(known | dict(hidden, messages=disguised))
        if len(text) > self.max_characters:
            raise ValueError(f"it has {len(text)} characters, more than the context can hold: shorten it")
        if real and template.rearranges:
            undisguised = template.render(known | dict(settings, messages=messages))
            if self._controls.are_same(undisguised, text, real):
                return undisguised, {}
        return text, real

    def _encode(self, text: str, real: Real) -> list[int]:
        with without_panic():
            return self._controls.encode(text, real) if real else self.encode(text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, which is a rendered prompt: special tokens are recognised; no tokens are
        added."""
        with without_panic():  # only the batch call lets other threads run meanwhile
            return list(self._tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    @cached_property
    def longest_token(self) -> int:
        """Number of characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the special tokens."""
        return self._marks.kept | self._marks.dropped

    def encode_answer(self, text: str) -> list[int]:
        """Return the token ids of an answer without its end of turn. Special tokens stay text. Other added tokens
        (`<tool_call>`) are recognised."""
        return self._encode(*self._controls.disguised_answer(text))

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `token_ids`. `skip_special`: without special tokens, except those around thoughts and
        calls of tools."""
        ids = list(token_ids)
        if skip_special and self._marks.kept and not self._marks.kept.isdisjoint(ids):
            ids, skip_special = [token for token in ids if token not in self._marks.dropped], False
        with without_panic():
            return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special))


class _SpecialMarks(NamedTuple):
    """Special tokens: those around thoughts and calls, and the others."""

    kept: frozenset[int]
    dropped: frozenset[int]


def _special_marks(tokenizer: Tokenizer, answers: AnswerFormat) -> _SpecialMarks:
    special = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    kept = frozenset(number for number, text in special.items() if text in answers.special_texts)
    return _SpecialMarks(kept, frozenset(special.keys() - kept))


@contextmanager
def without_panic() -> Iterator[None]:
    """Raise ValueError instead of a panic of `tokenizers`, which would end the process, and instead of its bare
    exceptions: a malformed tokenizer.json can cause both for some texts or tokens."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException" and type(error) is not Exception:
            raise
        raise ValueError(f"the tokenizer failed: {error}") from None


def byte_tokenizer() -> ChatTokenizer:
    """Return a tokenizer with one token per byte, which represents any text exactly, and the tiny policy's chat
    template. For policy stubs, which have no model."""
    tokenizer = byte_level(special := (USER, ASSISTANT, END))
    return ChatTokenizer(tokenizer, ChatTemplate(CHAT_TEMPLATE), {"eos_token": END}, (special.index(END),))


def byte_level(special: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with these special tokens, numbered from 0, and one token per byte."""
    vocabulary = {token: number for number, token in enumerate((*special, *sorted(ByteLevel.alphabet())))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _special_tokens(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, ... as strings. The files hold strings, or objects with a `content`."""
    declared = {**read_json_if_present(model_dir, "special_tokens_map.json"), **config}
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    texts: dict[str, str] = {}
    for name in names:
        token = declared.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text == encodable(text):
            texts[name] = text
        elif token is not None:
            path = model_dir / "tokenizer_config.json"
            raise ModelError(f"{path}: {name} is no text, but {token!r}: write the token as it is spelled")
    return texts


def _eos_ids(model_dir: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """Return all ids that end a turn: those of generation_config.json (else config.json) and the tokenizer's own."""
    files = (read_json_if_present(model_dir, name) for name in ("generation_config.json", "config.json"))
    declared: Any = next((ids for file in files if (ids := file.get("eos_token_id")) is not None), [])
    candidates = [*declared] if isinstance(declared, list) else [declared]
    if "eos_token" in special_tokens:
        candidates.append(tokenizer.token_to_id(special_tokens["eos_token"]))
    ids = [candidate for candidate in candidates if candidate is not None]
    if wrong := [each for each in ids if not isinstance(each, int)]:
        where = f"generation_config.json or config.json of model directory {model_dir}"
        raise ModelError(
            f"eos_token_id in {where} holds {wrong[0]!r}: set it to the number of a token, or a list of them"
        )
    if not ids:
        raise ModelError(f"model directory {model_dir} names no end-of-turn token: set eos_token_id in config.json")
    return tuple(sorted(set(ids)))
