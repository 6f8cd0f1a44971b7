"""Environments: tasks and environments of users, and their access to the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

from penstock.samples import Segment
from penstock.types import Sampling, SegmentGrant, Task


class TaskSource(Protocol):
    """A deterministic supply of tasks, endless or finite."""

    def task(self, index: int) -> Task | None:
        """Return the task at `index`; None past the end. The same index always gives the same task."""


class TaskError(ValueError):
    """The environment cannot play this task. Only the episodes of this task fail."""


Observation = str | Sequence[Mapping[str, Any]]
"""A text, which comes from the user, or messages with `role` and `content`."""


class ToolCall(NamedTuple):
    """A tool that the policy calls."""

    name: str
    arguments: Mapping[str, Any]


class Action(str):
    """An answer of the policy in an environment that declares tools: a text that also knows what it says."""

    content: str
    """Without reasoning and calls."""
    reasoning: str
    calls: tuple[ToolCall, ...]
    fault: str | None
    """Why a part of the content that begins like a call is none; None if there is no such part."""

    def __new__(
        cls,
        text: str,
        *,
        content: str = "",
        reasoning: str = "",
        calls: Sequence[ToolCall] = (),
        fault: str | None = None,
    ) -> Self:
        self = super().__new__(cls, text)
        self.content, self.reasoning, self.calls, self.fault = content, reasoning, tuple(calls), fault
        return self


class Environment(Protocol):
    """An environment for one episode, with the interface of Gymnasium and GEM. Methods may also be `async`.

    It may declare `system`, a text that stands before the first observation, and `tools`, as the OpenAI API has them,
    which the chat template shows. With tools its actions are `Action`s. `info["metrics"]` may map names to numbers;
    `metric_kinds` says how the values of an episode become one: their sum (`sum`), the largest (`max`), or else their
    mean. `info["state"]` may name the state in which the next action is taken (see `trainer.advantages`).
    """

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        """Start over. Returns (observation, info)."""

    def step(self, action: str) -> tuple[Observation, float | None, bool, bool, dict[str, Any]]:
        """Take an action. Returns (observation, reward, terminated, truncated, info).

        If the reward is None, `env.reward` computes it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Address of the policy for an agent's client: `OpenAI(base_url=..., api_key=...)`, or `Anthropic(...)` likewise.

    `base_url` alone identifies the episode, and so does `api_key`. So several episodes may share one of them.
    """

    base_url: str = field(repr=False)
    """Contains the key, so its representation is hidden."""
    api_key: str = field(repr=False)
    model: str


class PolicyClient(Protocol):
    """A client that requests actions from a rollout server."""

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """Generate one segment per grant for the same prompt (one request with n = len(grants)).

        A server that has released its memory answers at once with empty segments; their finish_reason is `abort`.
        """


class Demonstrations(Protocol):
    """Demonstrations for the warm start: token ids, and the positions to imitate."""

    def __iter__(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield (token_ids, loss_mask) for each task."""
