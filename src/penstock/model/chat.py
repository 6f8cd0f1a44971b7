"""Chat in tokens, without torch: render with jinja2, encode with `tokenizers`.

History is never tokenised twice: an episode keeps its token ids and asks only for the tokens that a new user message
adds (`continuation`). Renders as Hugging Face's `apply_chat_template` does, for any directory with a tokenizer.json.
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
from tokenizers import Tokenizer

from penstock.model.files import ModelError, read_json, read_json_if_present

SENTINEL = "penstockassistantturn"
"""Stands for an assistant turn when the template is asked what follows one."""


class ChatTokenizer:
    """The tokenizer and the chat template of a model directory."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template | None,
        special_tokens: Mapping[str, str],
        eos_ids: tuple[int, ...],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
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
        return cls(
            tokenizer, _template(model_dir, config), special_tokens, _eos_ids(model_dir, tokenizer, special_tokens)
        )

    def prompt(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins to speak. `settings` (`tools`, ...) are the
        template's own."""
        return self.encode(self.render(messages, **settings))

    def continuation(self, messages: Sequence[Mapping[str, Any]], *, ended: bool, **settings: Any) -> list[int]:
        """The tokens between an assistant's turn and its next one, with `messages` between.

        `ended`: the generated turn already closes with an end-of-turn token, which is then not repeated.
        """
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": SENTINEL}, *messages]
        _, found, rest = self.render(turn, **settings).partition(SENTINEL)
        if not found:
            raise ModelError("the chat template leaves out the assistant's words: it cannot carry a conversation")
        token_ids = self.encode(rest)
        return token_ids[1:] if ended and token_ids and token_ids[0] in self.eos_ids else token_ids

    def render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """The text of a conversation, up to where the assistant begins to speak."""
        if self._template is None:
            raise ModelError(
                "the model has no chat template: neither chat_template.jinja nor tokenizer_config.json holds one"
            )
        try:
            known = {"add_generation_prompt": True, "messages": messages} | self._special_tokens | settings
            text = self._template.render(**known)
            if settings.get("tools") and text == self._template.render(**known | {"tools": None}):
                raise ModelError("the chat template knows no `tools`: the model would not hear of them")
            return text
        except TemplateError as error:
            raise ModelError(f"the chat template refused the conversation: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens spelled in it are recognised, none are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `token_ids`."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)
        return text


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for tools that ask; when rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """jinja2's own `tojson` escapes HTML characters, which templates written for models do not expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


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
    """`bos_token`, `eos_token`, ...: strings, or objects with a `content`."""
    declared = {**read_json_if_present(model_dir, "special_tokens_map.json"), **config}
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {name: declared[name] for name in names if declared.get(name) is not None}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}


def _eos_ids(model_dir: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """Every id that ends a turn: those of generation_config.json (else config.json) and the tokenizer's own."""
    declared = read_json_if_present(model_dir, "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = read_json_if_present(model_dir, "config.json").get("eos_token_id")
    candidates = list(declared) if isinstance(declared, list) else [declared]
    if "eos_token" in special_tokens:
        candidates.append(tokenizer.token_to_id(special_tokens["eos_token"]))
    ids = {int(candidate) for candidate in candidates if candidate is not None}
    if not ids:
        raise ModelError(f"model directory {model_dir} names no end-of-turn token")
    return tuple(sorted(ids))
