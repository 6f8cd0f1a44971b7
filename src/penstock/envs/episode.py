"""The state of a running episode: its tokens so far, its remaining budgets, and how it ended.

Tokens count against the budgets over all segments and turns. The count does not restart when a server interrupts an
answer, or when another worker continues the episode.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.config import ConfigError, EnvironmentConfig
from penstock.deadline import deadline
from penstock.envs.calls import EpisodeEnvironment
from penstock.envs.dialogue import METRICS, STATE, EpisodeFailure, Message, Metric, PromptTooLong
from penstock.envs.rewards.reward import check_number
from penstock.envs.rewards.scorer import Scorer
from penstock.envs.worker_calls import MAX_INFO_MEMORY, memory_of, plain
from penstock.ports.environment import TaskError
from penstock.samples import Credit, Segment, Trajectory, Turn, path_to
from penstock.scheduler.segments import AnswerState, SegmentPolicy
from penstock.seeding import nth_seed
from penstock.sendable import sendable
from penstock.types import (
    MAX_METRIC_NAME,
    MOST_METRICS,
    EpisodeLease,
    Sampling,
    SegmentGrant,
    StopReason,
    Task,
    TrajectoryStatus,
)

MAX_INFO_BYTES_OF_ALL = 1 << 18
"""Limit of an episode's whole `info`: the summaries of a group travel in one message."""
MOST_INFO = 256
"""Most keys of an episode's `info` that are kept."""
LONGEST_SEPARATOR = 64
"""Maximum number of characters between two messages of a repeated conversation: line breaks, speaker names, turn
markers."""
SHORT_MESSAGE, LONGEST_BEFORE_SHORT = 8, 24
"""Before a message of so few characters the separator is this short: such a message is found in any sentence."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """State of one episode. `on_end` is called exactly once, however the episode ends."""

    lease: EpisodeLease
    grant: SegmentGrant
    task: Task
    settings: EnvironmentConfig
    scorer: Scorer | None = None
    """Computes the reward. None: the environment gives it."""
    sampling: Sampling
    bounds: SegmentPolicy
    on_end: Callable[[Episode], None]
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """When it started, on the clock of the event loop."""
    remaining_s: float = 0.0
    """Remaining seconds of the lease. Waiting for a grant does not count: that time is the scheduler's."""
    turn_remaining_s: float = 0.0
    """Remaining seconds of the open turn, or of the time before the first turn opens."""
    answering_s: float = 0.0
    """Seconds spent on answers: the wait for a grant, and generation."""
    rewarding_s: float = 0.0
    """Seconds spent on a reward outside the environment."""
    environment: EpisodeEnvironment | None = None
    """The episode's environment, once it is created."""
    opening: list[Message] = field(default_factory=list)
    """Messages before the first answer, once the environment has given its first observation."""
    said: list[str] = field(default_factory=list)
    """Observations and answers so far, alternating, as text."""
    num_drifts: int = 0
    """Number of times that repeated text of earlier answers was replaced by the recorded tokens."""
    context: list[int] = field(default_factory=list)
    """All tokens of the current branch so far, of observations and actions."""
    turns: list[Turn] = field(default_factory=list)
    num_siblings: int = 0
    """Number of earlier turns with the parent of the open turn."""
    num_tokens: int = 0
    """Number of tokens generated so far in all turns, including the open one."""
    turn_tokens: int = 0
    """Number of tokens generated so far in the open turn."""
    reward: float = 0.0
    text: str = ""
    status: TrajectoryStatus = "completed"
    stop_reason: StopReason | None = None
    error: str | None = None
    is_final: bool = False
    """Whether the episode would fail in the same way again."""
    wanted: frozenset[str] | None = frozenset()
    """Keys of the environment's `info` to keep. None: all."""
    info: dict[str, Any] = field(default_factory=dict)
    state: int | None = None
    """Hash of what the environment has just named as its state; None: it has named none."""
    _info_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Memory and encoded bytes of each value of `info` that was not left out."""
    credits: Sequence[Credit] = ()
    """The conversations' own rewards, if the agent gives some."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """What the environment gave in `info["metrics"]`, by name."""
    ended: bool = False
    """Whether the episode has ended: completed, failed or aborted."""
    _whole: SegmentPolicy = field(init=False)
    """The bounds without those of single turns."""

    def __post_init__(self) -> None:
        self.remaining_s = self.lease.deadline_s
        self._whole = self.bounds
        self._restart_turn_timer()

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return f"{self.lease.episode} of {self.task.task_id}"

    @property
    def turn_segments(self) -> int:
        """Return the open turn's tokens as a number of full segments. A short grant, or an interrupted one, does not
        cost a whole segment."""
        length = self.bounds.segment_length
        return self.turn_tokens // length if length else 0

    @property
    def turn_budget(self) -> int:
        """Return the number of tokens that the next turn may generate."""
        whole = self.bounds.global_max_length
        most = self.bounds.max_turn_tokens
        return most if whole is None else min(most, whole - self.num_tokens)

    def within_budget(self, grant: SegmentGrant) -> SegmentGrant:
        """Return the grant, reduced to the tokens that the turn and the episode may still generate."""
        left = self.bounds.tokens_left(num_tokens=self.num_tokens, turn_tokens=self.turn_tokens)
        return grant if grant.max_tokens <= left else SegmentGrant(episode=grant.episode, max_tokens=left)

    @property
    def sampling_seed(self) -> int:
        """Return the seed of the open turn. The engine mixes in the position, so only turns with the same parent need
        different ones."""
        seed = self.lease.sampling_seed
        return nth_seed(seed, self.num_siblings) if self.num_siblings else seed

    def limit_turn(self, max_tokens: int) -> None:
        """Let the next turn generate at most so many tokens, and no more than any turn may."""
        self.bounds = replace(self._whole, max_new_tokens=min(self._whole.max_new_tokens, max_tokens))

    def open_turn(self, observation_ids: list[int]) -> None:
        """Open a turn that continues the latest one."""
        self._open(Turn(observation_ids=observation_ids, segments=[], state=self.state))

    def open_branch(self, parent: int, observation_ids: list[int]) -> None:
        """Open a turn that continues any turn, or none (`ROOT`)."""
        self.context = self.context_after(parent)
        self.num_siblings = sum(turn.parent == parent for turn in self.turns)
        self._open(Turn(observation_ids=observation_ids, segments=[], parent=parent, state=self.state))

    def _open(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.context += turn.observation_ids
        self.turn_tokens = 0
        self._restart_turn_timer()

    def context_after(self, turn: int) -> list[int]:
        """Return all tokens from the beginning of a branch to the end of this turn. Empty for `ROOT`."""
        found: list[int] = []
        for index in path_to(self.turns, turn):
            found += self.turns[index].observation_ids + self.turns[index].token_ids
        return found

    def _restart_turn_timer(self) -> None:
        self.turn_remaining_s = self.settings.turn_timeout_s or math.inf

    def news(self, observation: str) -> str:
        """Return the part of an observation that the policy has not seen. Some environments repeat the whole
        conversation in each observation."""
        new = new_part(observation, self.said)
        if new is None:
            return observation
        self.num_drifts += 1
        return new

    def stop(self, reason: StopReason) -> None:
        """Record why the episode stops. Any reason but `terminated` makes its status `truncated`."""
        self.stop_reason = reason
        if reason != "terminated":
            self.status = "truncated"

    def earn(self, reward: float, *, turn: int = -1) -> None:
        """Add to the reward of an action, by default the latest one."""
        self.reward += reward
        self.turns[turn] = replace(self.turns[turn], reward=self.turns[turn].reward + reward)

    def forget_turn(self) -> None:
        """Remove the open turn and its tokens."""
        turn = self.turns.pop()
        del self.context[len(self.context) - len(turn.observation_ids) - self.turn_tokens :]
        self.num_tokens -= self.turn_tokens
        self.turn_tokens = 0

    def take(self, segment: Segment) -> AnswerState:
        """Append a segment to the open turn. Return whether the answer is now finished, cut or truncated."""
        if segment.token_ids:
            self.turns[-1].segments.append(segment)
        self.context += segment.token_ids
        self.num_tokens += len(segment.token_ids)
        self.turn_tokens += len(segment.token_ids)
        return self.bounds.after(
            reason=segment.finish_reason,
            turn_tokens=self.turn_tokens,
            episode_tokens=self.num_tokens,
            turn_segments=self.turn_segments,
        )

    async def complete(self, segment: Segment, more: Callable[[], Awaitable[Segment]]) -> bool:
        """Append a segment, and then segments from `more` as long as the answer is cut. Return whether the answer
        ended by itself."""
        while (state := self.take(segment)) == "cut":
            segment = await more()
        return state == "finished"

    def cut_turn(self, length: int) -> None:
        """Keep only the first `length` tokens of the latest answer, which ends there by itself."""
        turn, dropped = self.turns[-1], self.turn_tokens - length
        turn.segments[:] = [Segment.joined(turn.segments, "stop").cut(length, "stop")]
        del self.context[len(self.context) - dropped :]
        self.num_tokens -= dropped
        self.turn_tokens = length

    def continue_from(self, saved: Trajectory) -> None:
        """Continue from the single turn that another worker began."""
        (turn,) = saved.turns
        self.open_turn(turn.observation_ids)
        for segment in turn.segments:
            self.take(segment)

    def hear(self, info: object) -> None:
        """Keep the wanted keys of an environment's `info`, in a form that can be sent, and its metrics. Raises
        `EpisodeFailure` for metrics of another form."""
        if not isinstance(info, Mapping):
            return
        if METRICS in info:
            self._measure(info[METRICS])
        self.state = xxh3_64_intdigest(msgspec.msgpack.encode(plain(info[STATE]))) if STATE in info else None
        names = [str(name) for name in info if name != METRICS] if self.wanted is None else self.wanted
        for name in names:
            if name in info and (name in self.info or len(self.info) < MOST_INFO):
                self._keep(name, plain(info[name]))

    def _measure(self, metrics: object) -> None:
        if not isinstance(metrics, Mapping):
            raise EpisodeFailure(f"info['metrics'] is a {type(metrics).__name__}, not a mapping of names to numbers")
        for name, value in metrics.items():
            if not isinstance(name, str) or len(name) > MAX_METRIC_NAME:
                raise EpisodeFailure(f"info['metrics']: {str(name)[:MAX_METRIC_NAME]!r} is no short name")
            try:
                number = check_number(f"info['metrics'][{name!r}]", value)
            except ValueError as error:
                raise EpisodeFailure(str(error)) from None
            self.metrics.setdefault(sendable(name), Metric()).add(number)
        if len(self.metrics) > MOST_METRICS:
            raise EpisodeFailure(f"info['metrics'] has had {len(self.metrics)} names, more than {MOST_METRICS}")

    def _measured(self) -> dict[str, float]:
        kinds = self.environment.style.metric_kinds if self.environment is not None else {}
        return {name: metric.value(kinds.get(name, "mean")) for name, metric in self.metrics.items()}

    def _keep(self, name: str, value: Any) -> None:
        """Keep a value of `info`, or a text instead if the episode's summary would become too large."""
        self._info_sizes.pop(name, None)
        memory, size = memory_of(value), len(msgspec.msgpack.encode(value)) + len(name)
        all_memory = memory + sum(each[0] for each in self._info_sizes.values())
        all_size = size + sum(each[1] for each in self._info_sizes.values())
        if all_memory > MAX_INFO_MEMORY:
            value = "left out: the info of the episode holds too many values"
        elif all_size > MAX_INFO_BYTES_OF_ALL:
            value = f"left out: the info of the episode has {all_size} bytes"
        else:
            self._info_sizes[name] = memory, size
        self.info[name] = value

    def fail(self, error: Exception) -> None:
        if not self.ended:
            self.status, self.error = "failed", f"{type(error).__name__}: {sendable(str(error))}"
            self.is_final = isinstance(error, PromptTooLong | TaskError)
            self.end()

    def abort(self) -> None:
        """End the episode as `aborted`, unless it has ended already."""
        if not self.ended:
            self.status, self.error = "aborted", "the scheduler or the worker stopped the episode"
            self.end()

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            self.on_end(self)

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Turn an exception of the body into the trajectory's `error`, so that a bad environment does not stop the run.
        `ConfigError` passes through."""
        try:
            yield
        except ConfigError:
            raise  # every episode would fail in the same way, so the run must stop
        except Exception as error:
            self.fail(error)

    def trajectory(self) -> Trajectory:
        seconds = asyncio.get_running_loop().time() - self.began
        return Trajectory(
            episode=self.lease.episode,
            task_id=self.task.task_id,
            turns=list(self.turns),
            reward=self.reward,
            status=self.status,
            stop_reason=self.stop_reason,
            error=self.error,
            is_final=self.is_final,
            started_at=self.started_at,
            finished_at=self.started_at + seconds,
            env_s=max(seconds - self.answering_s - self.rewarding_s, 0.0),
            reward_s=self.rewarding_s,
            env_seed=self.lease.env_seed,
            temperature=self.sampling.temperature,
            info=self.info,
            metrics=self._measured(),
            credits=self.credits,
        )


@contextmanager
def contained_together(episodes: Sequence[Episode]) -> Iterator[None]:
    """Turn an exception of the body into the failure of these episodes. A lost server or a refused prompt then does not
    fail the worker."""
    try:
        yield
    except Exception as error:
        for episode in episodes:
            episode.fail(error)


@contextmanager
def answering(episodes: Sequence[Episode]) -> Iterator[None]:
    """Count the body's time as time spent on answers."""
    now = asyncio.get_running_loop().time
    started = now()
    try:
        yield
    finally:
        for episode in episodes:
            episode.answering_s += now() - started


@asynccontextmanager
async def spending(episodes: Sequence[Episode], *, resource: str, holder: str) -> AsyncIterator[None]:
    """Charge the body's time to the leases and turns of `episodes`. Raises `Stalled` when one of them has no time
    left."""
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


def _is_inside_a_word(text: str, start: int, end: int) -> bool:
    """Return whether `text[start:end]` begins or ends inside a word."""
    before, first, last, after = text[start - 1 : start], text[start], text[end - 1], text[end : end + 1]
    return (before.isalnum() and first.isalnum()) or (last.isalnum() and after.isalnum())
