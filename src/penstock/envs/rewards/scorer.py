"""Scores answers in reward workers, or on the event loop if the reward is `async` and only waits for other services."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Mapping
from typing import Any

import msgspec

from penstock.config import Config, ConfigError, EnvironmentConfig
from penstock.deadline import Stalled, deadline
from penstock.envs.calls import ConcurrencyLimit
from penstock.envs.exception_location import described
from penstock.envs.rewards.reward import RewardResult, checked_result, is_async, make_reward
from penstock.envs.worker_pool import WorkerPool

WORKER = f"{__name__}:RewardWorker"


class RewardFailure(RuntimeError):
    """An answer could not be scored."""


class RewardWorker:
    """The reward inside its own process."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self._reward = make_reward(name, options)

    def score(self, answer: str, payload: Mapping[str, Any]) -> RewardResult:
        return checked_result(self._reward.score(answer, payload))


class Scorer:
    """One reward and the processes that compute it."""

    def __init__(self, config: EnvironmentConfig, *, num_workers: int) -> None:
        """Create the reward. Raises `ConfigError` if it does not exist or its options do not fit."""
        assert config.reward is not None
        self.name = config.reward
        self._timeout_s = config.reward_timeout_s
        self._options = dict(config.reward_options)
        self._reward = make_reward(self.name, self._options)
        self._timeout_reward: float | None = getattr(self._reward, "timeout_reward", None)
        self._limit = ConcurrencyLimit()
        self._workers = WorkerPool(num_workers, WORKER, self.name, self._options)
        self.counts: Counter[str] = Counter()
        """Counters since the start: `scored`, `score_timeouts`, and the sums of the rewards' parts."""

    async def score(self, answer: str, payload: Mapping[str, Any], *, waiter: str) -> float:
        """Return the reward of an answer. Raises `RewardFailure`, or `ConfigError`."""
        try:
            result = checked_result(await self._score(answer, payload, waiter))
        except (ConfigError, RewardFailure):
            raise
        except Exception as error:
            raise RewardFailure(described(error)) from error
        self.counts["scored"] += 1
        for name, value in result.parts.items():
            self.counts[f"reward_{name}"] += value  # type: ignore[assignment]
        return result.reward

    async def _score(self, answer: str, payload: Mapping[str, Any], waiter: str) -> Any:
        if is_async(self._reward):
            async with self._limit.slot(self._reward, waiter=waiter):
                return await self._in_time(self._reward.score(answer, payload), waiter)
        async with self._workers.one(waiter=waiter) as worker:
            result = await self._in_time(worker.call("score", answer, dict(payload)), waiter)
        return msgspec.convert(result, RewardResult) if isinstance(result, dict) else result

    async def _in_time(self, score: Awaitable[Any], waiter: str) -> Any:
        """Return the score. After the time limit return `timeout_reward`, or raise `RewardFailure` if it is not set."""
        try:
            async with deadline(self._timeout_s, waiter=waiter, resource="its reward", holder=f"reward {self.name}"):
                return await score
        except Stalled as error:
            self.counts["score_timeouts"] += 1
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
        self._scorers: dict[bytes, Scorer] = {}
        for settings in config.environments.by_key.values():
            if settings.reward is not None and _key(settings) not in self._scorers:
                self._scorers[_key(settings)] = Scorer(settings, num_workers=config.env.reward_workers)

    def of(self, settings: EnvironmentConfig) -> Scorer | None:
        """Return the scorer of an environment; None if the environment gives the rewards itself."""
        return self._scorers[_key(settings)] if settings.reward is not None else None

    def counts(self) -> Counter[str]:
        """Return the sum of all scorers' counters."""
        return sum((scorer.counts for scorer in self._scorers.values()), Counter())

    async def aclose(self) -> None:
        for scorer in self._scorers.values():
            await scorer.close()


def _key(settings: EnvironmentConfig) -> bytes:
    """Return a key that is equal for identical rewards: same name, options and time limit."""
    return msgspec.json.encode((settings.reward, settings.reward_options, settings.reward_timeout_s), order="sorted")
