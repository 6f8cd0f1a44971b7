"""The state of a running episode: its tokens so far, its remaining budgets, and how it ended.

Tokens count against the budgets over all segments and turns. The count does not restart when a server interrupts an
answer, or when another worker continues the episode. The episode of an agent may have several open turns at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from penstock.config import ConfigError, EnvironmentConfig
from penstock.deadline import deadline
from penstock.envs.calls import EpisodeEnvironment
from penstock.envs.dialogue import METRICS, STATE, EpisodeFailure, Message, Metric, PromptTooLong, new_part
from penstock.envs.rewards.reward import check_number
from penstock.envs.rewards.scorer import Scorer
from penstock.envs.stopwatch import Stopwatch
from penstock.envs.worker_calls import MAX_INFO_MEMORY, memory_of, plain
from penstock.ports.environment import Action, TaskError
from penstock.samples import CalledTool, Credit, Segment, ToolUse, Trajectory, Turn, num_routed, path_to
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


@dataclass(slots=True, kw_only=True, eq=False)
class OpenTurn:
    """A turn whose answer is being generated."""

    episode: Episode
    turn: Turn
    context: list[int]
    """All tokens of its branch so far, of observations and actions."""
    bounds: SegmentPolicy
    """Those of the episode, with the most tokens of this turn."""
    sampling_seed: int
    grant: int | None = None
    """Number of the latest grant that it has used, if answers share their grants (`SharedGrant`)."""
    num_tokens: int = 0
    """Number of tokens generated so far."""
    spent: Stopwatch = field(default_factory=Stopwatch)

    @property
    def sampling(self) -> Sampling:
        """Return how the next segment is sampled. The experts of tokens that are not known yet are recorded, if they
        will be replayed."""
        episode = self.episode
        if not episode.records_experts:
            return episode.sampling
        after = len(episode.turns) - 1 if self.turn.parent is None else self.turn.parent
        turns = [episode.turns[index] for index in path_to(episode.turns, after)]
        return replace(episode.sampling, routed_from=num_routed([*turns, self.turn]))

    @property
    def num_segments(self) -> int:
        """Return the tokens as a number of full segments. A short grant, or an interrupted one, does not cost a whole
        segment."""
        length = self.bounds.segment_length
        return self.num_tokens // length if length else 0

    @property
    def num_left(self) -> int:
        """Return the number of tokens that this turn may still generate."""
        return self.bounds.max_turn_tokens - self.num_tokens

    def prompt_end(self, num_tokens: int) -> list[int]:
        """Return the last `num_tokens` tokens before the answer."""
        end = len(self.context) - self.num_tokens
        return self.context[max(end - num_tokens, 0) : end]

    def within_budget(self, grant: SegmentGrant) -> SegmentGrant:
        """Return the grant, reduced to the tokens that the turn and the episode may still generate."""
        left = self.bounds.tokens_left(num_tokens=self.episode.num_tokens, turn_tokens=self.num_tokens)
        return grant if grant.max_tokens <= left else SegmentGrant(episode=grant.episode, max_tokens=left)

    def take(self, segment: Segment) -> AnswerState:
        """Append a segment. Return whether the answer is now finished, cut or truncated."""
        if segment.token_ids:
            self.turn.segments.append(segment)
        self.context += segment.token_ids
        self.num_tokens += len(segment.token_ids)
        self.episode.num_tokens += len(segment.token_ids)
        return self.bounds.after(
            reason=segment.finish_reason,
            turn_tokens=self.num_tokens,
            episode_tokens=self.episode.num_tokens,
            turn_segments=self.num_segments,
        )

    async def complete(self, segment: Segment, more: Callable[[], Awaitable[Segment]]) -> bool:
        """Append a segment, and then segments from `more` as long as the answer is cut. Return whether the answer
        ended by itself."""
        while (state := self.take(segment)) == "cut":
            segment = await more()
        return state == "finished"

    def cut(self, length: int) -> None:
        """Keep only the first `length` tokens of the answer, which ends there by itself."""
        dropped = self.num_tokens - length
        self.turn.segments[:] = [Segment.joined(self.turn.segments, "stop").cut(length, "stop")]
        del self.context[len(self.context) - dropped :]
        self.episode.num_tokens -= dropped
        self.num_tokens = length

    def close(self) -> int:
        """Add the turn to the episode's turns, since its answer is complete. Return its index there."""
        self.episode.open.remove(self)
        answered = replace(self.turn, answered_at=self.episode.now, generating_s=self.spent.seconds)
        self.episode.turns.append(answered)
        return len(self.episode.turns) - 1

    def drop(self) -> None:
        """Forget the turn and its tokens."""
        self.episode.open.remove(self)
        self.episode.num_tokens -= self.num_tokens


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
    records_experts: bool = False
    """Whether the experts of its tokens are recorded, if the policy has some."""
    bounds: SegmentPolicy
    on_end: Callable[[Episode], None]
    started_at: float = field(default_factory=time.time)
    began: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    """When it started, on the clock of the event loop."""
    spent: Stopwatch = field(default_factory=Stopwatch)
    """Time of the lease. Waiting for a grant does not count: that time is the scheduler's."""
    turn_spent: Stopwatch = field(default_factory=Stopwatch)
    """Time of the turn that was opened last, or before the first turn opens."""
    answering: Stopwatch = field(default_factory=Stopwatch)
    """Time of answers: the wait for a grant, and generation."""
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
    turns: list[Turn] = field(default_factory=list)
    """Turns with their whole answers."""
    open: list[OpenTurn] = field(default_factory=list)
    num_tokens: int = 0
    """Number of tokens generated so far in all turns, including the open ones."""
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
    _num_opened: Counter[int] = field(default_factory=Counter)
    """Number of turns that were opened after a turn, by its index."""

    @property
    def name(self) -> str:
        """Return the name for messages."""
        return f"{self.lease.episode} of {self.task.task_id}"

    @property
    def now(self) -> float:
        """Return the time in seconds since the epoch, which never goes back within an episode."""
        return self.started_at + asyncio.get_running_loop().time() - self.began

    @property
    def remaining_s(self) -> float:
        """Return the remaining seconds of the lease."""
        return self.lease.deadline_s - self.spent.seconds

    @property
    def turn_budget(self) -> int:
        """Return the number of tokens that the next turn may generate. The open turns may use up theirs."""
        whole = self.bounds.global_max_length
        most = self.bounds.max_turn_tokens
        return most if whole is None else min(most, whole - self.num_tokens - sum(each.num_left for each in self.open))

    def open_turn(self, observation_ids: list[int], max_tokens: int, *, parent: int | None = None) -> OpenTurn:
        """Open a turn that generates at most `max_tokens`, and no more than any turn may. `parent`: the turn that it
        continues, or none (`ROOT`); by default the latest turn."""
        after = len(self.turns) - 1 if parent is None else parent
        seed, number = self.lease.sampling_seed, self._num_opened[after]
        self._num_opened[after] += 1
        opened = OpenTurn(
            episode=self,
            turn=Turn(
                observation_ids=observation_ids, segments=[], parent=parent, state=self.state, started_at=self.now
            ),
            context=self.context_after(after) + observation_ids,
            bounds=replace(self.bounds, max_new_tokens=min(self.bounds.max_new_tokens, max_tokens)),
            # The engine mixes in the position, so only turns with the same parent need different seeds.
            sampling_seed=nth_seed(seed, number) if number else seed,
        )
        self.open.append(opened)
        self.turn_spent = opened.spent
        return opened

    def context_after(self, turn: int) -> list[int]:
        """Return all tokens from the beginning of a branch to the end of this turn. Empty for `ROOT`."""
        found: list[int] = []
        for index in path_to(self.turns, turn):
            found += self.turns[index].observation_ids + self.turns[index].token_ids
        return found

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

    def called(self, turn: int, calls: Sequence[CalledTool]) -> None:
        """Note that an answer calls tools, which an agent will execute."""
        self.turns[turn] = replace(self.turns[turn], tools=ToolUse(calls=calls, started_at=self.now))

    @contextmanager
    def executing(self, turn: int, action: str) -> Iterator[None]:
        """Note when the body executes the tool calls of an action, if there are any, and what it raises."""
        calls = [CalledTool(each.name) for each in action.calls] if isinstance(action, Action) else []
        use, error = ToolUse(calls=calls, started_at=self.now), None
        try:
            yield
        except BaseException as raised:
            error = type(raised.__cause__ or raised).__name__
            raise
        finally:
            if calls:
                self.turns[turn] = replace(self.turns[turn], tools=replace(use, finished_at=self.now, error=error))

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
        """End the episode as `failed`. Of a group of exceptions the first one is told."""
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
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
            turns=[*self.turns, *(each.turn for each in self.open)],
            reward=self.reward,
            status=self.status,
            stop_reason=self.stop_reason,
            error=self.error,
            is_final=self.is_final,
            started_at=self.started_at,
            finished_at=self.started_at + seconds,
            env_s=max(seconds - self.answering.seconds - self.rewarding_s, 0.0),
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
    fail the worker. `ConfigError` passes through."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        for episode in episodes:
            episode.fail(error)


@contextmanager
def answering(episodes: Sequence[Episode]) -> Iterator[None]:
    """Count the body's time as time spent on answers."""
    with ExitStack() as stack:
        for episode in episodes:
            stack.enter_context(episode.answering)
        yield


@asynccontextmanager
async def spending(
    episodes: Sequence[Episode], turn: OpenTurn | None = None, /, *, resource: str, holder: str
) -> AsyncIterator[None]:
    """Charge the body's time to the leases and turns of `episodes`. Raises `Stalled` when one of them has no time
    left. `turn`: by default the turns that were opened last."""
    most = [each.settings.turn_timeout_s or math.inf for each in episodes]
    watches = [each.turn_spent for each in episodes] if turn is None else [turn.spent]
    left = [seconds - watch.seconds for seconds, watch in zip(most, watches, strict=True)]
    remaining_s = min(*left, *(each.remaining_s for each in episodes))
    with ExitStack() as stack:
        for watch in [*watches, *(each.spent for each in episodes)]:
            stack.enter_context(watch)
        async with deadline(remaining_s, waiter=episodes[0].name, resource=resource, holder=holder):
            yield
