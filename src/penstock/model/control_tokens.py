"""Control tokens: text of messages, tools and settings that spells one stays text.

A control token tells the model what text must not tell it: that a turn begins or ends, or that a tool has answered.
Only the chat template writes them, but `tokenizers` recognises them wherever they are spelled. So text that might
spell one is disguised before it is rendered. All control tokens that are recognised in the rendered text are then the
template's own, even where text completes what the template or another text has begun. Finally the disguise is taken
off, and the text between these tokens is tokenised without control tokens.

A template that rearranges strings, as `lower` and `replace` do, can make a token of any text, and does not do so with a
disguise. Then all text is disguised, and the conversation is also rendered as it is: if the two have the same control
tokens and, but for case, the same text between them, these tokens are the template's own, and the disguise was not
needed.

Other conversations, nearly all, are rendered and tokenised as they are.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import msgspec
from tokenizers import AddedToken, Tokenizer

from penstock.model.chat_template import ChatTemplate
from penstock.model.disguise import Change, Disguise, Message, Strings, conversation, has_private
from penstock.model.files import ModelError
from penstock.model.spellings import Spellings, any_of

ORDINARY = re.compile(r"[\s▁]*|</?[a-z]+[1-6]?>")
"""Added tokens that are vocabulary: white space, and plain tags (`<td>` in Gemma). They are control tokens only if they
are marked as special, or if the chat template has them, opening or closing (`<think>`)."""

ANSWERED = re.compile(
    r"</?(think|tool_call|arg_key|arg_value)>|\[/?THINK\]|\[TOOL_CALLS\]"
    r"|<[|｜]tool[_▁](calls?|sep|calls?([_▁][a-z]+)*[_▁](begin|end))[|｜]>"
)
"""Control tokens that an answer may spell, if they are not marked as special: those around thoughts and calls of tools.
Answers have them in all well-known families of models. Every other one stays text there too."""

MOST_REMEMBERED, MAX_REMEMBERED_BYTES = 256, 65_536
"""How many settings are remembered, and the most bytes of one."""

LONGEST, MOST_PARTS = 256, 200_000_000
"""Characters of the longest control token, and the sum of the third powers of all lengths: the characters of all parts
of tokens are of this order."""

Real = Mapping[int, str]
"""Characters behind a disguise."""


def _check_lengths(tokens: Collection[str]) -> None:
    longest, cost = max(map(len, tokens), default=0), sum(len(token) ** 3 for token in tokens)
    if longest > LONGEST or cost > MOST_PARTS:
        raise ModelError(
            f"tokenizer.json has {len(tokens)} control tokens, the longest of {longest} characters: tokens of at most "
            f"{LONGEST} characters are served, and fewer long ones; remove them from `added_tokens`"
        )


class ControlTokens:
    """The control tokens of a tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, eos_ids: Sequence[int]) -> None:
        source, constants = (template.source, template.constants) if template else ("", frozenset[str]())
        added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special or number in eos_ids}
        self._tokens = {
            number: token.content
            for number, token in added.items()
            if number in special or not ORDINARY.fullmatch(token.content) or _is_pair_in(source, token.content)
        }
        _check_lengths(self._tokens.values())
        self._all = Spellings(self._tokens.values())
        spoken = {
            token for number, token in self._tokens.items() if number not in special and ANSWERED.fullmatch(token)
        }
        self._unspoken = Spellings(set(self._tokens.values()) - spoken)
        """Control tokens that no answer may spell."""
        visible = {word for word in constants if word.strip() and not self._unspoken.might_be_in(word)}
        self._visible = any_of(spoken | visible)
        """Parts of answers: text that the template may look for, and tokens that an answer may spell (`<think>`)."""
        self._keys = template.names.difference(self._tokens.values()) if template else frozenset[str]()
        self._rearranges = template is not None and template.rearranges
        self._tokenizer = tokenizer
        normalizes = any(added[number].normalized for number in self._tokens)
        self._normalizer = tokenizer.normalizer if normalizes else None
        self._harmless: set[bytes | None] = set()
        """Settings of templates, as JSON, that were found to spell no control token. Most requests repeat them."""

    def disguised(self, messages: Sequence[Message], settings: Message) -> tuple[Sequence[Message], Message, Real]:
        """Return a conversation with disguised text, and the characters behind it; the conversation itself and no
        characters if no text might spell a control token. Where the template rearranges strings, any text might."""
        found: list[str] = []
        searching = Strings(self._keys, self._finder(self._all, found), self._finder(self._unspoken, found))
        described = _as_json(settings)
        conversation(messages, {} if described in self._harmless else settings, searching)
        if not found:
            self._remember(settings, described)
            return messages, settings, {}
        disguise = Disguise()
        strings = Strings(self._keys, partial(self._text, disguise), partial(self._answer, disguise))
        return *conversation(messages, settings, strings), disguise.real

    def _remember(self, settings: Message, described: bytes | None) -> None:
        """Note that these settings are harmless."""
        if described is not None and described not in self._harmless and len(described) <= MAX_REMEMBERED_BYTES:
            if msgspec.json.decode(described) != settings:
                return  # JSON shows strings that no search has seen, for example of a dataclass
            if len(self._harmless) >= MOST_REMEMBERED:
                self._harmless.clear()
            self._harmless.add(described)

    def disguised_answer(self, text: str) -> tuple[str, Real]:
        """Return the text of an answer, disguised if it might spell a token that is not for answers, and the characters
        behind it."""
        disguise = Disguise()
        changed = self._answer(disguise, text) if self._might_spell(self._unspoken, text) else text
        return changed, disguise.real

    def _finder(self, spellings: Spellings, found: list[str]) -> Change:
        """Return a function that notes a string that might spell one of these tokens."""

        def note(text: str) -> str:
            if self._might_spell(spellings, text):
                found.append(text)
            return text

        return note

    def _text(self, disguise: Disguise, text: str) -> str:
        return text.translate(disguise) if has_private(text) or self._might_spell(self._all, text) else text

    def _answer(self, disguise: Disguise, text: str) -> str:
        """Return an answer of the policy, disguised except for its visible parts."""
        if not has_private(text) and not self._might_spell(self._unspoken, text):
            return text
        parts = self._visible.split(text)
        return "".join(part if place % 2 else part.translate(disguise) for place, part in enumerate(parts))

    def _might_spell(self, spellings: Spellings, text: str) -> bool:
        return (
            self._rearranges
            or spellings.might_be_in(text)
            or (self._normalizer is not None and spellings.might_be_in(self._normalizer.normalize_str(text)))
        )

    def are_same(self, text: str, disguised: str, real: Real) -> bool:
        """Return whether two rendered texts have the same control tokens, and between them the same text but for case.
        A text with other parts may have removed a token of the template and spelled it itself."""
        return self._parts(text, {}) == self._parts(disguised, real)

    def _parts(self, text: str, real: Real) -> list[int | str]:
        parts: list[int | str] = []
        done = 0
        for number, start, end in self._found(text):
            parts += [text[done:start].translate(real).casefold(), number]
            done = end
        return [*parts, text[done:].translate(real).casefold()]

    def encode(self, text: str, real: Real) -> list[int]:
        """Return the token ids of a disguised text."""
        spelled, done = [], 0
        for number, start, end in self._found(text):
            spelled += [text[done:start].translate(real), self._secret(number)]
            done = end
        spelled.append(text[done:].translate(real))
        return list(self._plain.encode_batch(["".join(spelled)], add_special_tokens=False)[0].ids)

    def _found(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield the control tokens of a rendered text, with their beginnings and ends."""
        # Only the batch call lets other threads run meanwhile.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        for number, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            # The id of the unknown token is also that of an unknown character, which is none of the template's tokens.
            if number in self._tokens and (self._normalizer is not None or self._tokens[number] in text[start:end]):
                yield number, start, end

    @cached_property
    def _plain(self) -> Tokenizer:
        """A tokenizer with the same ids, in which each control token is spelled in a way that no text can guess."""
        parts = json.loads(self._tokenizer.to_str())
        renamed = {token: self._secret(number) for number, token in self._tokens.items()}
        for added in parts["added_tokens"]:
            if added["id"] in self._tokens:
                flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
                added |= {"content": self._secret(added["id"]), "special": True, **flags}
        parts["model"] = _renamed(parts["model"], renamed)
        return Tokenizer.from_str(json.dumps(parts | {"post_processor": None}))

    def _secret(self, number: int) -> str:
        return f"{self._prefix}{number:010}"

    @cached_property
    def _prefix(self) -> str:
        return secrets.token_hex(16)


def _as_json(settings: Message) -> bytes | None:
    """Return the settings as JSON; None if they have no such form."""
    try:
        return msgspec.json.encode(settings)
    except (TypeError, ValueError, RecursionError):
        return None


def _is_pair_in(source: str, tag: str) -> bool:
    opening = tag.replace("</", "<")
    return tag.strip() != "" and (opening in source or opening.replace("<", "</") in source)


def _renamed(model: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a tokenizer's model with renamed tokens. No merge results in one of them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        vocab = {names.get(token, token): number for token, number in vocab.items()}
    else:
        vocab = [[names.get(token, token), score] for token, score in vocab]
    changed = model | {"vocab": vocab}
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        changed["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    if isinstance(model.get("unk_token"), str):
        changed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return changed
