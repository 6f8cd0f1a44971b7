"""An episode in play: its tokens so far, what is left of its budgets, and how it ended.

Budgets are pinned: tokens are counted over all segments and turns. Neither a server that gave way nor another worker
that goes on with the episode starts the count anew.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.config import ConfigError, EnvironmentConfig
from penstock.deadline import deadline
from penstock.envs.calls import World
from penstock.envs.drift import unsaid
from penstock.envs.info import plain
from penstock.envs.rewards.scorer import Scorer
from penstock.scheduler.segments import SegmentDecision, SegmentPolicy
from penstock.types import (
    EpisodeLease,
    Sampling,
    Segment,
    SegmentGrant,
    StopReason,
    Trajectory,
    TrajectoryStatus,
    Turn,
)


@dataclass(slots=True, kw_only=True)
class Episode:
    """The books of one. `on_end` is called exactly once, whatever happens."""

    lease: EpisodeLease
    grant: SegmentGrant
    task_id: str
    settings: EnvironmentConfig
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Of the task."""
    scorer: Scorer | None = None
    """Gives the reward; None: the environment does."""
    sampling: Sampling
    bounds: SegmentPolicy
    on_end: Callable[[Episode], None]
    started_at: float = field(default_factory=time.time)
    remaining_s: float = 0.0
    """What is left of the lease's time. Waiting for a grant costs none: that is the scheduler's time."""
    turn_timeout_s: float = math.inf
    """For what happens until the first answer is asked for, and for every turn since."""
    turn_remaining_s: float = math.inf
    """What is left of that in the open turn."""
    world: World | None = None
    """Its environment, once it is made."""
    said: list[str] = field(default_factory=list)
    """Observations and answers so far, in turns, as the environment shows and hears them."""
    num_drifts: int = 0
    """How often text of answers came back that had to be replaced by their recorded tokens."""
    context: list[int] = field(default_factory=list)
    """Every token so far: observations and actions."""
    turns: list[Turn] = field(default_factory=list)
    num_tokens: int = 0
    """Generated so far in all turns, and in the open one."""
    turn_tokens: int = 0
    reward: float = 0.0
    text: str = ""
    status: TrajectoryStatus = "completed"
    stop_reason: StopReason | None = None
    error: str | None = None
    wanted: frozenset[str] = frozenset()
    """Names of the environment's `info` that are kept."""
    info: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    """Nothing more will happen: played to its end, or failed."""

    def __post_init__(self) -> None:
        self.remaining_s = self.lease.deadline_s
        self.turn_remaining_s = self.turn_timeout_s

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.lease.episode} of {self.task_id}"

    @property
    def turn_segments(self) -> int:
        """Segments' worth of tokens in the open turn: a grant that was short, or that a server cut short, does not cost
        a whole segment."""
        length = self.bounds.segment_length
        return self.turn_tokens // length if length else 0

    @property
    def turn_budget(self) -> int:
        """Tokens the next turn may generate."""
        whole = self.bounds.global_max_length
        most = self.bounds.max_turn_tokens
        return most if whole is None else min(most, whole - self.num_tokens)

    def within_budget(self, grant: SegmentGrant) -> SegmentGrant:
        """The grant, cut to what the turn and the episode may still generate."""
        left = self.bounds.grant_tokens(num_tokens=self.num_tokens, turn_tokens=self.turn_tokens)
        return grant if grant.max_tokens <= left else SegmentGrant(episode=grant.episode, max_tokens=left)

    def open_turn(self, observation_ids: list[int]) -> None:
        self.turns.append(Turn(observation_ids=observation_ids, segments=[]))
        self.context += observation_ids
        self.turn_tokens = 0
        self.turn_remaining_s = self.turn_timeout_s

    def news(self, observation: str) -> str:
        """What of an observation the policy has not seen: some environments show all that was said, once more."""
        new = unsaid(observation, self.said)
        if new is None:
            return observation
        self.num_drifts += 1
        return new

    def stop(self, reason: StopReason) -> None:
        """It goes no further."""
        self.stop_reason = reason
        if reason != "terminated":
            self.status = "truncated"

    def forget_turn(self) -> None:
        """As if the open turn had never been."""
        turn = self.turns.pop()
        del self.context[len(self.context) - len(turn.observation_ids) - self.turn_tokens :]
        self.num_tokens -= self.turn_tokens
        self.turn_tokens = 0

    def take(self, segment: Segment) -> SegmentDecision:
        """Append a segment to the open turn; says what the answer is now."""
        if segment.token_ids:
            self.turns[-1].segments.append(segment)
        self.context += segment.token_ids
        self.num_tokens += len(segment.token_ids)
        self.turn_tokens += len(segment.token_ids)
        return self.bounds.after(
            finish_reason=segment.finish_reason,
            turn_tokens=self.turn_tokens,
            episode_tokens=self.num_tokens,
            turn_segments=self.turn_segments,
        )

    async def complete(self, segment: Segment, more: Callable[[], Awaitable[Segment]]) -> bool:
        """Append a segment, and `more` as long as the answer is cut. True if it ended by itself."""
        while (decision := self.take(segment)).case == "cut":
            segment = await more()
        return decision.case == "finished"

    def go_on_from(self, saved: Trajectory) -> None:
        """Take over the one turn of an episode that another worker had begun."""
        (turn,) = saved.turns
        self.open_turn(turn.observation_ids)
        for segment in turn.segments:
            self.take(segment)

    def hear(self, info: object) -> None:
        """Keep what is wanted of what the environment told, in a form that can be sent."""
        if self.wanted and isinstance(info, Mapping):
            self.info |= {name: plain(info[name]) for name in self.wanted if name in info}

    def fail(self, error: Exception) -> None:
        if not self.ended:
            self.status, self.error = "failed", f"{type(error).__name__}: {error}"
            self.end()

    def abort(self) -> None:
        """Nobody plays it any more."""
        if not self.ended:
            self.status, self.error = "aborted", "it was given up"
            self.end()

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.on_end(self)

    @contextmanager
    def contained(self) -> Iterator[None]:
        """The boundary between a bad environment and the run: an exception becomes the trajectory's `error`."""
        try:
            yield
        except ConfigError:
            raise  # no episode could do better: the run is told
        except Exception as error:
            self.fail(error)

    def trajectory(self) -> Trajectory:
        return Trajectory(
            episode=self.lease.episode,
            task_id=self.task_id,
            turns=self.turns,
            reward=self.reward,
            status=self.status,
            stop_reason=self.stop_reason,
            error=self.error,
            started_at=self.started_at,
            finished_at=time.time(),
            env_seed=self.lease.env_seed,
            info=self.info,
        )


@contextmanager
def contained_together(episodes: Sequence[Episode]) -> Iterator[None]:
    """A lost server or a refused prompt fails these episodes, not the worker."""
    try:
        yield
    except Exception as error:
        for episode in episodes:
            episode.fail(error)


@asynccontextmanager
async def spending(episodes: Sequence[Episode], *, resource: str, holder: str) -> AsyncIterator[None]:
    """Charge the body's time to leases and turns of `episodes`; `Stalled` when one of them has none left."""
    now = asyncio.get_running_loop().time
    started = now()
    remaining_s = min(min(episode.remaining_s, episode.turn_remaining_s) for episode in episodes)
    try:
        async with deadline(remaining_s, waiter=episodes[0].name, resource=resource, holder=holder):
            yield
    finally:
        spent_s = now() - started
        for episode in episodes:
            episode.remaining_s -= spent_s
            episode.turn_remaining_s -= spent_s
