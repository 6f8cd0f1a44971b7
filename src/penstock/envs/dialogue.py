"""Messages of environments with `reset` and `step`, and the policy's actions there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Action, Observation, ToolCall
from penstock.sendable import encodable

Message = Mapping[str, Any]
METRICS = "metrics"
"""Key of the metrics in an environment's `info`."""
STATE = "state"
"""Key of the environment's state in its `info`, for advantages that compare turns in the same state."""
METRIC_KINDS = ("mean", "sum", "max")
LONGEST_SEPARATOR = 64
"""Maximum number of characters between two messages of a repeated conversation: line breaks, speaker names, turn
markers."""
SHORT_MESSAGE, LONGEST_BEFORE_SHORT = 8, 24
"""Before a message of so few characters the separator is this short: such a message is found in any sentence."""


class EpisodeFailure(RuntimeError):
    """An episode cannot continue. The message becomes the `error` of its trajectory."""


@dataclass(slots=True)
class Metric:
    """A metric of an episode: what its steps gave so far."""

    count: int = 0
    total: float = 0.0
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.count, self.total, self.most = self.count + 1, self.total + value, max(self.most, value)

    def value(self, kind: str) -> float:
        """Return the value of the episode; `kind` is one of `METRIC_KINDS`."""
        return {"mean": self.total / self.count, "sum": self.total, "max": self.most}[kind]


class PromptTooLong(EpisodeFailure):
    """The first prompt does not fit into the context. Another attempt would have the same prompt."""


@dataclass(frozen=True, slots=True)
class Style:
    """What an environment declares besides its observations."""

    system: str | None = None
    """Message of the role `system` before the first observation."""
    tools: Sequence[Message] = ()
    """Tools as the OpenAI API has them. With any, actions are `Action`s."""
    metric_kinds: Mapping[str, str] = field(default_factory=dict)
    """How the metrics of steps become one of the episode: `mean` where nothing is declared, `sum`, or `max`."""

    @classmethod
    def of(cls, env: object) -> Style:
        """Return what an environment declares in `system`, `tools` and `metric_kinds`. Raises `EpisodeFailure` for
        other forms."""
        system, tools = getattr(env, "system", None), getattr(env, "tools", None) or ()
        kinds = getattr(env, "metric_kinds", None) or {}
        if not isinstance(kinds, Mapping) or not set(kinds.values()) <= set(METRIC_KINDS):
            raise EpisodeFailure(f"metric_kinds has other values than {', '.join(METRIC_KINDS)}")
        if system is not None and not isinstance(system, str):
            raise EpisodeFailure(f"system is a {type(system).__name__}, not a text")
        if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
            raise EpisodeFailure(f"tools is a {type(tools).__name__}, not a list of tools")
        for number, tool in enumerate(tools):
            _check_tool(f"tools[{number}]", tool)
        return cls(system, tuple(tools), dict(kinds))

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings for the chat template."""
        return {"tools": list(self.tools)} if self.tools else {}

    def opening(self, observation: Observation) -> list[Message]:
        """Return the messages before the first answer."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *messages_of(observation)]

    def action(self, chat: ChatTokenizer, text: str, prompt_ids: Sequence[int]) -> str:
        """Return an answer as the environment gets it: a text, and with tools an `Action`. `prompt_ids`: at least the
        last tokens before the answer."""
        if not self.tools:
            return text
        is_thinking = chat.answers.is_thinking(prompt_ids, chat.decode)
        said = chat.answers.read(text, self.tools, is_thinking=is_thinking)
        calls = tuple(ToolCall(each.name, msgspec.json.decode(each.arguments)) for each in said.calls)
        return Action(text, content=said.content, reasoning=said.reasoning, calls=calls, fault=said.fault)


def messages_of(observation: Observation) -> list[Message]:
    """Return an observation as messages. A text comes from the user."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)


def checked(observation: object) -> Observation:
    """Return an observation that can be sent and tokenised. Raises `EpisodeFailure` for another form."""
    if isinstance(observation, str):
        return encodable(observation)
    if not isinstance(observation, list | tuple) or not observation:
        raise EpisodeFailure(f"the observation is a {type(observation).__name__}, not a string or a list of messages")
    for number, message in enumerate(observation):
        if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
            raise EpisodeFailure(f"message {number} of the observation is no object with a role and a content")
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                raise EpisodeFailure(f"message {number} of the observation has no text as its {name}")
    return [
        {key: encodable(value) if isinstance(value, str) else value for key, value in m.items()} for m in observation
    ]


def new_part(text: str, conversation: Sequence[str]) -> str | None:
    """Return the part of `text` after the messages of `conversation`. None unless `text` begins with all of them, in
    order.

    The recorded tokens stand for the repeated part. The policy's sampled answer may tokenise differently when an
    environment shows it again, and the context would then not match the recorded log-probabilities.
    """
    end = 0
    for message in (each.strip() for each in conversation):
        longest = LONGEST_SEPARATOR if len(message) > SHORT_MESSAGE else LONGEST_BEFORE_SHORT
        start = text.find(message, end, end + len(message) + longest) if message else -1
        if start < 0 or _is_inside_a_word(text, start, start + len(message)):
            return None
        end = start + len(message)
    return text[end:]


def text_of(observation: Observation) -> str:
    """Return the text that an observation shows."""
    return observation if isinstance(observation, str) else "\n".join(str(each["content"]) for each in observation)


def num_characters(messages: Sequence[Message]) -> int:
    """Return the number of characters of messages, without their roles."""
    values = (value for each in messages for name, value in each.items() if name != "role")
    return sum(len(value if isinstance(value, str) else repr(value)) for value in values)


def _is_inside_a_word(text: str, start: int, end: int) -> bool:
    """Return whether `text[start:end]` begins or ends inside a word."""
    before, first, last, after = text[start - 1 : start], text[start], text[end - 1], text[end : end + 1]
    return (before.isalnum() and first.isalnum()) or (last.isalnum() and after.isalnum())


def _check_tool(where: str, tool: object) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise EpisodeFailure(
            f'{where} has no function with a name: {{"type": "function", "function": {{"name": ...}}}}'
        )
    parameters = function.get("parameters", {})
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties", {}), Mapping):
        raise EpisodeFailure(f"{where}: parameters of {function['name']} are no JSON schema of an object")
