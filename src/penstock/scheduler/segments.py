"""Segments: how many tokens a grant allows, and what becomes of an answer when one ends.

Three cases. Finished: the answer ended by itself, it is experience. Cut: it is unfinished and first in the next
dispatch. Truncated: it used up what its turn or its episode may have, it is experience cut short (UloRL, arXiv
2507.19766). Budgets are cumulative: neither a resume nor a server that gave way grants a full one again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config import Config, EnvironmentConfig
from penstock.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentDecision:
    """What an answer is after a segment."""

    case: Literal["finished", "cut", "truncated"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPolicy:
    """The bounds on a grant, a turn and an episode, in tokens. None does not bound."""

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
        """For one environment of the run."""
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
        """Most tokens of one turn."""
        if self.segment_length is None or self.max_segment_count is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.segment_length * self.max_segment_count)

    @property
    def max_episode_tokens(self) -> int:
        """Most tokens of an episode, over all its turns."""
        turns = self.max_turns * self.max_turn_tokens
        return turns if self.global_max_length is None else min(turns, self.global_max_length)

    def grant_tokens(self, *, num_tokens: int, turn_tokens: int = 0) -> int:
        """What the next grant may generate; at least 1 while something is left.

        `num_tokens` is what the episode has generated so far, `turn_tokens` what its open turn has. Who does not know
        the latter leaves it out; then who plays the turn keeps to `max_turn_tokens`.
        """
        left = [self.max_turn_tokens - turn_tokens]
        if self.segment_length is not None:
            left.append(self.segment_length)
        if self.global_max_length is not None:
            left.append(self.global_max_length - num_tokens)
        return max(min(left), 0)

    def after(
        self, *, finish_reason: FinishReason, turn_tokens: int, episode_tokens: int, turn_segments: int
    ) -> SegmentDecision:
        """What the answer is now. `turn_segments` counts its segments that were cut for length: an abort by a server
        that gave way is a cut that does not count."""
        if finish_reason == "stop":
            return SegmentDecision(case="finished", reason=f"ended by itself after {turn_tokens} tokens")
        if self.global_max_length is not None and episode_tokens >= self.global_max_length:
            return self._truncated(f"{episode_tokens} tokens in all, global_max_length is {self.global_max_length}")
        if turn_tokens >= self.max_new_tokens:
            return self._truncated(f"{turn_tokens} tokens in this turn, max_new_tokens is {self.max_new_tokens}")
        if self.max_segment_count is not None and turn_segments >= self.max_segment_count:
            return self._truncated(f"{turn_segments} segments, max_segment_count is {self.max_segment_count}")
        if turn_tokens >= self.max_turn_tokens:
            return self._truncated(f"{turn_tokens} tokens in this turn, its segments allow {self.max_turn_tokens}")
        why = "the server gave way" if finish_reason == "abort" else f"segment {turn_segments} was full"
        return SegmentDecision(case="cut", reason=f"{why} after {turn_tokens} tokens")

    @staticmethod
    def _truncated(reason: str) -> SegmentDecision:
        return SegmentDecision(case="truncated", reason=reason)


def max_trained_tokens(config: Config) -> int:
    """Most tokens of an episode of any environment that is trained."""
    environments = config.environments.train.values()
    return max(SegmentPolicy.from_config(config, each).max_episode_tokens for each in environments)
