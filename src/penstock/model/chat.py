"""Chat templates and tokenization without torch: jinja2 renders, `tokenizers` encodes.

The history is never tokenized twice: an episode keeps its token ids, and requests only the tokens that new messages
add (`continuation`). The rendered text equals that of Hugging Face's `apply_chat_template`. Works for any directory
with a tokenizer.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from penstock.model.files import ModelError, read_json, read_json_if_present
from penstock.model.tiny import ASSISTANT, CHAT_TEMPLATE, END, USER

SENTINEL = "penstockassistantturn"
"""Placeholder text of an assistant turn, used to find the text that the template puts after such a turn."""


class ChatTokenizer:
    """The tokenizer and the chat template of a model directory."""

    def __init__(
        self, tokenizer: Tokenizer, template: Template | None, specials: Mapping[str, str], eos_ids: tuple[int, ...]
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(specials)
        self.eos_ids = eos_ids
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, model_dir: Path) -> ChatTokenizer:
        """Read tokenizer.json, tokenizer_config.json and the chat template of `model_dir`."""
        config = read_json(model_dir, "tokenizer_config.json")
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"model directory {model_dir} has no tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # `tokenizers` raises bare Exception for every malformed file
            raise ModelError(f"{path} cannot be read: {error}") from None
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special_tokens = _special_tokens(model_dir, config)
        eos_ids = _eos_ids(model_dir, tokenizer, special_tokens)
        return cls(tokenizer, _template(model_dir, config), special_tokens, eos_ids)

    def prompt(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
        """Return the token ids of a conversation, up to the start of the assistant's next turn.

        `settings` (`tools`, ...) are passed to the template.
        """
        return self.encode(self.render(messages, **settings))

    def continuation(self, messages: Sequence[Mapping[str, Any]], *, ended: bool, **settings: Any) -> list[int]:
        """Return the tokens between two assistant turns, with `messages` between them.

        `ended`: the generated turn already ends with an end-of-turn token, which is then not repeated.
        """
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": SENTINEL}, *messages]
        _, found, rest = self.render(turn, **settings).partition(SENTINEL)
        if not found:
            raise ModelError("the chat template drops the assistant's text: use a template that keeps it")
        token_ids = self.encode(rest)
        return token_ids[1:] if ended and token_ids and token_ids[0] in self.eos_ids else token_ids

    def render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """Return the text of a conversation, up to the start of the assistant's next turn."""
        if self._template is None:
            raise ModelError("no chat template: add chat_template.jinja, or `chat_template` in tokenizer_config.json")
        try:
            known = {"add_generation_prompt": True, "messages": messages} | self._special_tokens | settings
            text = self._template.render(**known)
            if settings.get("tools") and text == self._template.render(**known | {"tools": None}):
                raise ModelError("the chat template ignores `tools`: use a template that renders them")
            return text
        except TemplateError as error:
            raise ModelError(f"the chat template rejected the conversation: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`. Special tokens in the text are recognised; no tokens are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `token_ids`."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special))


def byte_tokenizer() -> ChatTokenizer:
    """Return a tokenizer with one token per byte, which represents any text exactly, and the tiny policy's chat
    template. For policy stubs, which have no model."""
    special = (USER, ASSISTANT, END)
    vocabulary = {token: number for number, token in enumerate((*special, *sorted(ByteLevel.alphabet())))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return ChatTokenizer(tokenizer, Template(CHAT_TEMPLATE), {"eos_token": END}, (vocabulary[END],))


class _GenerationTag(Extension):
    """The tag `{% generation %}`, with which templates mark the assistant's words. It does not change the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """Return JSON without HTML escapes: jinja2's own `tojson` adds them, and chat templates do not expect them."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return env


def _template(model_dir: Path, config: Mapping[str, Any]) -> Template | None:
    file = model_dir / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    try:
        return _environment().from_string(source)
    except TemplateError as error:
        raise ModelError(f"the chat template of {model_dir} does not compile: {error}") from None


def _special_tokens(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token`, ... as strings. The files hold strings, or objects with a `content`."""
    declared = {**read_json_if_present(model_dir, "special_tokens_map.json"), **config}
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {name: declared[name] for name in names if declared.get(name) is not None}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}


def _eos_ids(model_dir: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """Return all ids that end a turn: those of generation_config.json (else config.json) and the tokenizer's own."""
    files = (read_json_if_present(model_dir, name) for name in ("generation_config.json", "config.json"))
    declared: Any = next((ids for file in files if (ids := file.get("eos_token_id")) is not None), [])
    candidates = [*declared] if isinstance(declared, list) else [declared]
    if "eos_token" in special_tokens:
        candidates.append(tokenizer.token_to_id(special_tokens["eos_token"]))
    ids = {int(candidate) for candidate in candidates if candidate is not None}
    if not ids:
        raise ModelError(f"model directory {model_dir} names no end-of-turn token: set eos_token_id in config.json")
    return tuple(sorted(ids))
