"""Segments: how many tokens a grant allows, and the state of an answer when a segment ends.

There are three cases (UloRL, arXiv 2507.19766):

* finished: the answer ended by itself, and is experience;
* cut: the answer is unfinished, and the next dispatch starts with it;
* truncated: the answer used up the budget of its turn or its episode, and is truncated experience.

Budgets are cumulative: an answer does not get a new budget after a resume, or after a server aborted it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config import Config, EnvironmentConfig
from penstock.types import FinishReason

AnswerState = Literal["finished", "cut", "truncated"]
"""The state of an answer after a segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPolicy:
    """The bounds on a grant, a turn and an episode, in tokens. None means no bound."""

    segment_length: int | None
    max_segment_count: int | None
    """Segments per turn."""
    global_max_length: int | None
    """Tokens over all turns of an episode."""
    max_new_tokens: int
    """Tokens per turn."""
    max_turns: int = 1

    @classmethod
    def from_config(cls, config: Config, environment: EnvironmentConfig) -> SegmentPolicy:
        """Return the bounds for one environment of the run."""
        settings = config.scheduler
        return cls(
            segment_length=settings.segment_length,
            max_segment_count=settings.max_segment_count,
            global_max_length=settings.global_max_length,
            max_new_tokens=environment.max_new_tokens,
            max_turns=environment.max_turns,
        )

    @property
    def max_turn_tokens(self) -> int:
        """Return the most tokens that one turn may generate."""
        if self.segment_length is None or self.max_segment_count is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.segment_length * self.max_segment_count)

    @property
    def max_episode_tokens(self) -> int:
        """Return the most tokens that an episode may generate, over all its turns."""
        turns = self.max_turns * self.max_turn_tokens
        return turns if self.global_max_length is None else min(turns, self.global_max_length)

    def grant_tokens(self, *, num_tokens: int) -> int:
        """Return the tokens that the next grant may generate; 0 if the episode's budget is used up.

        The episode has generated `num_tokens` so far. The worker keeps the turn within `max_turn_tokens`.
        """
        left = self.tokens_left(num_tokens=num_tokens)
        return left if self.segment_length is None else min(left, self.segment_length)

    def tokens_left(self, *, num_tokens: int, turn_tokens: int = 0) -> int:
        """Return the tokens that the open turn may still generate, in any number of segments.

        The episode has generated `num_tokens` so far, `turn_tokens` of them in its open turn.
        """
        left = self.max_turn_tokens - turn_tokens
        if self.global_max_length is not None:
            left = min(left, self.global_max_length - num_tokens)
        return max(left, 0)

    def after(self, *, reason: FinishReason, turn_tokens: int, episode_tokens: int, turn_segments: int) -> AnswerState:
        """Return the state of the answer after a segment.

        `turn_segments` counts the segments of the turn that were cut for length. It does not count segments that a
        server aborted.
        """
        if reason == "stop":
            return "finished"
        is_used_up = (
            turn_tokens >= self.max_turn_tokens
            or (self.max_segment_count is not None and turn_segments >= self.max_segment_count)
            or (self.global_max_length is not None and episode_tokens >= self.global_max_length)
        )
        return "truncated" if is_used_up else "cut"


def max_trained_tokens(config: Config) -> int:
    """Return the most tokens that an episode of any training environment may generate."""
    environments = config.environments.train.values()
    return max(SegmentPolicy.from_config(config, each).max_episode_tokens for each in environments)
