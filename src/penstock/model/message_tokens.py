"""Conversations as tokens, for policies that have messages and no tokens of their own.

One token is one byte of JSON or text, and special tokens say where messages begin. So the messages can be read from the
tokens again, exactly, and all parts that handle tokens handle these conversations too: segments, branches, the pool.
Such tokens are never shown to anyone, because no policy has sampled them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.model.answer_format import call_ids
from penstock.model.chat import ChatTokenizer, byte_level
from penstock.model.chat_template import ChatTemplate

TOOLS, MESSAGE, ASSISTANT, END = "<|tools|>", "<|message|>", "<|assistant|>", "<|end|>"
SPECIAL = (TOOLS, MESSAGE, ASSISTANT, END)
TEMPLATE = (
    f"{{%- if tools -%}}{{{{- '{TOOLS}' + (tools | tojson) -}}}}{{%- endif -%}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    f"{{{{- '{ASSISTANT}' + (message['content'] or '') -}}}}"
    "{%- for call in message.get('tool_calls') or [] -%}"
    "{{- '<tool_call>\\n{\"name\": ' + (call['function']['name'] | tojson) + ', \"arguments\": ' -}}"
    "{{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    f"{{{{- '{END}' -}}}}"
    "{%- else -%}"
    f"{{{{- '{MESSAGE}' + (message | tojson) -}}}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}"
)

Message = dict[str, Any]


class Chat(NamedTuple):
    """A conversation that was read from tokens."""

    messages: list[Message]
    """As the OpenAI API has them. Calls have the names with which their results refer to them."""
    tools: list[Any]
    begun: str
    """Beginning of the assistant's next answer, which the policy is to continue."""


class MessageTokenizer(ChatTokenizer):
    """Makes tokens of any conversation, and reads them."""

    def __init__(self) -> None:
        specials, eos = {"eos_token": END}, SPECIAL.index(END)
        super().__init__(byte_level(SPECIAL), ChatTemplate(TEMPLATE), specials, (eos,))

    def answer_ids(self, text: str) -> list[int]:
        """Return the tokens of a whole answer."""
        return [*self.encode_answer(text), *self.eos_ids]

    def chat(self, token_ids: Sequence[int]) -> Chat:
        """Return the conversation of these tokens. Raises ValueError if they are those of none."""
        messages, tools, begun, pending = list[Message](), list[Any](), "", list[str]()
        for mark, start, end in self._parts(token_ids):
            text = self.decode(token_ids[start:end])
            if mark == TOOLS:
                tools = _decoded(text)
            elif mark == MESSAGE:
                messages += self._heard(_decoded(text), pending)
            else:
                messages += map(_unanswered, pending)
                if end == len(token_ids):
                    begun = text
                    break
                said = self._said(text, token_ids[:start], token_ids[start : end + 1], tools)
                pending = [call["id"] for call in said.get("tool_calls", ())]
                messages.append(said)
        return Chat(messages, tools, begun)

    def transcript(self, token_ids: Sequence[int]) -> list[Message]:
        """Return the messages of these tokens, which end with an answer."""
        is_cut = bool(token_ids) and token_ids[-1] not in self.eos_ids
        return self.chat([*token_ids, *self.eos_ids] if is_cut else token_ids).messages

    def _parts(self, token_ids: Sequence[int]) -> Iterator[tuple[str, int, int]]:
        """Yield (mark, start, end) of each part; `start` is the first place after its mark."""
        places = [place for place, token in enumerate(token_ids) if token < len(SPECIAL)]
        if not places or places[0]:
            raise ValueError("text without messages: send a chat request")
        for place, end in zip(places, [*places[1:], len(token_ids)], strict=True):
            mark = SPECIAL[token_ids[place]]
            if mark != END:
                yield mark, place + 1, end
            elif end > place + 1:
                raise ValueError("text between two messages: send a chat request")

    def _said(self, text: str, before: Sequence[int], answer: Sequence[int], tools: Sequence[Any]) -> Message:
        """Return an answer of the assistant as a message."""
        said = self.answers.read(text, tools)
        message: Message = {"role": "assistant", "content": said.content}
        if said.calls:
            names = call_ids(self.answers, list(before), list(answer), len(said.calls))
            calls = zip(names, said.calls, strict=True)
            message["tool_calls"] = [call.tool_call(name) for name, call in calls]
        return message

    def _heard(self, message: Message, pending: list[str]) -> Iterator[Message]:
        """Yield a message that is not the assistant's, after results for calls that have none: the API wants one for
        each. `pending`: the names of the calls without a result."""
        if message.get("role") == "tool" and pending:
            given = message.get("tool_call_id")
            name = given if given in pending else pending[0]
            pending.remove(name)
            yield message | {"tool_call_id": name}
            return
        yield from map(_unanswered, pending)
        pending.clear()
        yield message


def call_text(name: str, arguments: Mapping[str, Any] | str) -> str:
    """Return a call as an answer has it. `arguments`: an object, or a text that is not the JSON of one."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False).replace("<", "\\u003c")  # none closes the call
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def _unanswered(name: str) -> Message:
    return {"role": "tool", "tool_call_id": name, "content": ""}


def _decoded(text: str) -> Any:
    return json.loads(text, strict=False)  # text that was disguised has its control characters as they are
