"""Scores answers in reward workers, or on the event loop if the reward is `async` and only waits for other services.

A reward worker runs in a sandbox unless its reward says otherwise. Its results are checked as data from an adversary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from penstock.config import Config, ConfigError, EnvironmentConfig
from penstock.config.secret_settings import resolved
from penstock.deadline import Stalled, deadline
from penstock.envs.calls import ConcurrencyLimit
from penstock.envs.exception_location import RaisedElsewhere, described
from penstock.envs.rewards import dataset_rule
from penstock.envs.rewards.forked import close_memory, forked
from penstock.envs.rewards.reward import (
    LARGEST,
    MOST_PARTS,
    RewardResult,
    checked_result,
    is_async,
    is_confined,
    make_reward,
)
from penstock.envs.rewards.reward_box import open_reward_box
from penstock.envs.worker_pool import MAX_ANSWER_BYTES, ProcessLost, WorkerPool, WorkerProcess
from penstock.sandbox import SandboxUnavailable

WORKER = f"{__name__}:RewardWorker"
CONFINED_BYTES = 1 << 20
"""Limit of an answer of a reward worker in a sandbox. Decoded objects are up to 70 times as large."""
MOST_SUMS = 2 * MOST_PARTS
"""Most different parts with a counter."""
NEEDS_MORE = (
    "FileNotFoundError",
    "PermissionError",
    "ModuleNotFoundError",
    "ImportError",
    "Connect",
    "gaierror",
    "OSError",
)
"""Beginnings of errors that a sandbox may cause."""
HINT = (
    "its worker runs in a sandbox, without the network and with only the installed packages and the Python files of "
    "its folder. If the reward needs more, and no text of the policy can do harm with it, set `confined = False` in "
    "the class or on the function"
)

logger = logging.getLogger(__name__)


class RewardFailure(RuntimeError):
    """An answer could not be scored."""


class RewardWorker:
    """The reward inside its own process."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._reward = make_reward(name, options)
        self._forks = getattr(self._reward, "executes_answers", False)
        self._check = getattr(self._reward, "check", None)
        self._timeout_reward = getattr(self._reward, "timeout_reward", 0.0)
        if self._forks:
            close_memory()

    def score(self, answer: str, payload: Mapping[str, Any]) -> RewardResult:
        if not self._forks:
            return self._result(answer, payload)
        if self._check is not None:
            self._check(payload)
        encoded = forked(lambda: msgspec.msgpack.encode(self._outcome(answer, payload)))
        outcome = None if encoded is None else _decoded(encoded)
        if isinstance(outcome, str) and self._check is None:
            raise ValueError(outcome)
        return outcome if isinstance(outcome, RewardResult) else RewardResult(reward=self._timeout_reward)

    def _result(self, answer: str, payload: Mapping[str, Any]) -> RewardResult:
        return checked_result(self._reward.score(answer, payload))

    def _outcome(self, answer: str, payload: Mapping[str, Any]) -> RewardResult | str:
        """Return the result, or the description of an exception."""
        try:
            return self._result(answer, payload)
        except Exception as error:
            return described(error)


def _decoded(encoded: bytes) -> RewardResult | str | None:
    """Return the outcome that a forked process wrote; None if only the answer can have written it."""
    try:
        outcome = msgspec.msgpack.decode(encoded, type=RewardResult | str)
        return outcome if isinstance(outcome, str) else checked_result(outcome)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Scorer:
    """One reward and the processes that compute it."""

    def __init__(self, config: EnvironmentConfig, *, num_workers: int) -> None:
        """Create the reward. Raises `ConfigError` if it does not exist or its options do not fit."""
        assert config.reward is not None
        self.name = config.reward
        self._timeout_s = config.reward_timeout_s
        self._options = resolved(config.reward_options, "env.reward_options")
        self._reward = make_reward(self.name, self._options)
        self._timeout_reward: float | None = getattr(self._reward, "timeout_reward", None)
        self._executes: bool = getattr(self._reward, "executes_answers", False)
        self._failing: float = self._timeout_reward or 0.0
        self._limit = ConcurrencyLimit()
        self._is_confined = is_confined(self._reward)
        opener, max_bytes = None, MAX_ANSWER_BYTES
        if self._is_confined:
            opener, max_bytes = partial(open_reward_box, self.name), CONFINED_BYTES
        self._workers = WorkerPool(
            num_workers, WORKER, self.name, self._options, open_box=opener, max_answer_bytes=max_bytes
        )
        self._counts: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        """Sums of the rewards' parts."""
        self._logged: set[str] = set()

    @property
    def counts(self) -> Counter[str]:
        """Counters since the start: `scored`, `score_timeouts`, and the sums of the rewards' parts."""
        return Counter({**self._sums, **self._counts})

    async def score(self, answer: str, payload: Mapping[str, Any], *, waiter: str) -> float:
        """Return the reward of an answer. Raises `RewardFailure`, or `ConfigError`."""
        try:
            result = self._plausible(checked_result(await self._score(answer, payload, waiter)))
        except (ConfigError, RewardFailure):
            raise
        except Exception as error:
            raise RewardFailure(described(error)) from error
        self._counts["scored"] += 1
        for name, value in result.parts.items():
            self._add(f"reward_{name}", value)
        return result.reward

    def _plausible(self, result: RewardResult) -> RewardResult:
        """Return the result, or that of a failing answer if it has a reward or a part that this reward never gives."""
        lowest, highest = getattr(self._reward, "reward_range", (-LARGEST, LARGEST))
        names = getattr(self._reward, "part_names", result.parts)
        if lowest <= result.reward <= highest and result.parts.keys() <= set(names):
            return result
        self._log_once(
            f"an answer earns {self._failing:g}: its result is none of reward {self.name}, which gives {lowest:g} to "
            f"{highest:g} with the parts {list(names)}. An answer that executes may have forged it"
        )
        return RewardResult(reward=self._failing)

    def _add(self, name: str, value: float) -> None:
        """Add to the sum of a part. Parts beyond the limit have no sum."""
        if name in self._sums or len(self._sums) < MOST_SUMS:
            self._sums[name] += value  # type: ignore[assignment]
        else:
            self._log_once(f"reward {self.name} has over {MOST_SUMS} different parts: the others have no counter")

    def _log_once(self, message: str) -> None:
        if message not in self._logged:
            self._logged.add(message)
            logger.warning(message)

    async def _score(self, answer: str, payload: Mapping[str, Any], waiter: str) -> Any:
        if is_async(self._reward):
            async with self._limit.slot(self._reward, waiter=waiter):
                return await self._in_time(self._reward.score(answer, payload), waiter)
        with self._hint():
            async with self._workers.one(waiter=waiter) as worker:
                result = await self._in_time(self._call(worker, answer, payload), waiter)
        return msgspec.convert(result, RewardResult) if isinstance(result, dict) else result

    async def _call(self, worker: WorkerProcess, answer: str, payload: Mapping[str, Any]) -> Any:
        """Return the worker's result. A ConfigError becomes a `RewardFailure`: an answer may have caused it, and must
        not end the run. An answer that executes and ends the worker earns the reward of a failing answer."""
        try:
            return await worker.call("score", answer, dict(payload))
        except ProcessLost:
            if not self._executes:
                raise
            self._log_once(f"an answer ended its reward worker ({self.name}) and earns {self._failing:g}")
            return self._failing
        except ConfigError as error:
            raise RewardFailure(str(error)) from None

    @contextmanager
    def _hint(self) -> Iterator[None]:
        """Say in errors of the body that a sandbox may be their cause."""
        try:
            yield
        except SandboxUnavailable:
            raise
        except ConfigError as error:  # the reward can be made here, but not in its worker
            raise ConfigError(f"{error}; {HINT}" if self._is_confined else str(error)) from None
        except RaisedElsewhere as error:
            if self._is_confined and str(error).startswith(NEEDS_MORE):
                raise RaisedElsewhere(f"{error}; {HINT}", error.origin) from None
            raise

    async def _in_time(self, score: Awaitable[Any], waiter: str) -> Any:
        """Return the score. After the time limit return `timeout_reward`, or raise `RewardFailure` if it is not set."""
        try:
            async with deadline(self._timeout_s, waiter=waiter, resource="its reward", holder=f"reward {self.name}"):
                return await score
        except Stalled as error:
            self._counts["score_timeouts"] += 1
            if self._timeout_reward is None:
                raise RewardFailure(f"no score within env.reward_timeout_s ({self._timeout_s:g} s)") from error
            return self._timeout_reward

    async def close(self) -> None:
        """End the reward workers, and close the reward if it runs on the event loop."""
        await self._workers.close()
        if is_async(self._reward) and hasattr(self._reward, "close"):
            await self._reward.close()


class Scorers:
    """The rewards of all environments of a worker. Identical rewards share their reward workers."""

    def __init__(self, config: Config) -> None:
        """Create all rewards. Raises `ConfigError` if one cannot be created."""
        self._num_workers = config.env.reward_workers
        self._scorers: dict[bytes, Scorer] = {}
        for settings in config.environments.by_key.values():
            if settings.reward is not None:
                self._scorer(settings)

    def of(self, settings: EnvironmentConfig, payload: Mapping[str, Any]) -> Scorer | None:
        """Return the scorer of a task; None if its environment gives the reward itself."""
        if dataset_rule.is_scored_apart(settings, payload):
            options = {name: settings.options[name] for name in ("full_marks_only",) if name in settings.options}
            settings = settings.model_copy(update={"reward": dataset_rule.NAME, "reward_options": options})
        return self._scorer(settings) if settings.reward is not None else None

    def _scorer(self, settings: EnvironmentConfig) -> Scorer:
        key = _key(settings)
        if key not in self._scorers:
            self._scorers[key] = Scorer(settings, num_workers=self._num_workers)
        return self._scorers[key]

    def counts(self) -> Counter[str]:
        """Return the sum of all scorers' counters."""
        return sum((scorer.counts for scorer in self._scorers.values()), Counter())

    async def aclose(self) -> None:
        for scorer in self._scorers.values():
            await scorer.close()


def _key(settings: EnvironmentConfig) -> bytes:
    """Return a key that is equal for identical rewards: same name, options and time limit."""
    return msgspec.json.encode((settings.reward, settings.reward_options, settings.reward_timeout_s), order="sorted")
