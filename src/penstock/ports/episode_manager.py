"""The port of one's own episode managers: classes that run the loop of an episode in place of the built-in one.

    class LatestOnly:
        \"\"\"Shows the policy the latest observation, without its history.\"\"\"

        async def play(self, episode: ManagedEpisode) -> None:
            observation, info = await episode.reset()
            while True:
                answer = await episode.answer([{"role": "user", "content": observation}])
                outcome = await episode.step(answer)
                if outcome.terminated or outcome.truncated:
                    return
                observation = outcome.observation

The setting `env.manager` names the class. Each episode gets an object of its own, `Class(**env.manager_options)`, on
the worker's event loop. Leases, grants, deadlines and the recording of tokens stay with the worker. Whatever a manager
raises, the lease ends in exactly one trajectory. A manager may not block, and must let its cancellation pass: otherwise
it is left behind, and its episode ends without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from penstock.ports.environment import Observation
from penstock.types import Task


class Outcome(NamedTuple):
    """Result of one step of an environment."""

    observation: Observation
    reward: float | None
    """None: the environment leaves it to `env.reward`."""
    terminated: bool
    """The environment reached a terminal state."""
    truncated: bool
    """The environment stopped before a terminal state."""
    info: Mapping[str, Any]
    """Further information from the environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of the policy."""

    turn: int
    """Its number in the episode."""
    text: str
    action: str
    """The text as the environment gets it: an `Action` if the environment declares tools."""
    token_ids: Sequence[int]
    is_finished: bool
    """False if the answer was cut at a limit."""


class ManagedEpisode(Protocol):
    """An episode, as its manager sees it."""

    task: Task
    seed: int
    """Of the environment."""
    max_turns: int

    async def reset(self) -> tuple[Observation, Mapping[str, Any]]:
        """Reset the environment. Returns its first observation and its `info`."""

    async def answer(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, **settings: Any
    ) -> Answer:
        """Ask the policy, as an agent does with a chat request. Several tasks may ask at once.

        If the messages begin with an earlier conversation and its answer, the recorded tokens are used; else they begin
        a new branch. `settings` are for the chat template: `tools`, which are those of the environment by default, and
        the template's own. Raises `Over` if no turn or token is left. A manager need not catch it.
        """

    async def step(self, answer: Answer, action: str | None = None) -> Outcome:
        """Take an action, by default that of the answer. The answer gets the reward. The episode ends as its last
        step did."""

    def earn(self, answer: Answer, reward: float) -> None:
        """Add to the reward of an answer. Where `env.reward` computes the reward of the episode, this counts within
        the episode only, for advantages of turns."""

    def train_only(self, answer: Answer, tokens: Sequence[bool]) -> None:
        """Train only these tokens of an answer: one flag per token. The others count as context."""


class EpisodeManager(Protocol):
    """The loop of an episode."""

    async def play(self, episode: ManagedEpisode) -> None:
        """Play the episode to its end."""
