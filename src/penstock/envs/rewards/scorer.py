"""Scores answers beside the event loop: in reward workers, or on it if the reward only asks others and waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

import msgspec

from penstock.config import Config, ConfigError, EnvironmentConfig
from penstock.deadline import Stalled, deadline, placed
from penstock.envs.hosts import Host, Hosts
from penstock.envs.origin import described
from penstock.envs.rewards.reward import Reward, RewardResult, checked_result, is_async, make_reward

MAKER = f"{__name__}:make_inside"


class RewardFailure(RuntimeError):
    """An answer could not be scored."""


class Inside:
    """The reward, in the reward worker that holds it."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward

    def score(self, answer: str, payload: Mapping[str, Any]) -> RewardResult:
        return checked_result(self._reward.score(answer, payload))


def make_inside(name: str, options: Mapping[str, Any]) -> Inside:
    """Called in the process that is to hold it."""
    return Inside(make_reward(name, options))


class Scorer:
    """One reward, and the processes that compute it."""

    def __init__(self, config: EnvironmentConfig, *, num_workers: int) -> None:
        """Raises `ConfigError`."""
        assert config.reward is not None
        self.name = config.reward
        self._timeout_s = config.reward_timeout_s
        self._options = dict(config.reward_options)
        self._reward = make_reward(self.name, self._options)
        self._timeout_reward: float | None = getattr(self._reward, "timeout_reward", None)
        limit: int | None = getattr(self._reward, "max_concurrent", None)
        self._places = asyncio.Semaphore(limit) if limit is not None else None
        self._hosts = Hosts(num_workers, prepare=self._prepare)
        self.counts: Counter[str] = Counter()
        """Since the start: `scored`, `score_timeouts`, and the sums of the rewards' parts."""

    async def score(self, answer: str, payload: Mapping[str, Any], *, waiter: str) -> float:
        """The reward. Raises `RewardFailure`, or `ConfigError`."""
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
            async with self._place(waiter):
                return await self._in_time(self._reward.score(answer, payload), waiter)
        async with self._hosts.one(waiter=waiter) as host:
            result = await self._in_time(host.call("score", answer, dict(payload)), waiter)
        return msgspec.convert(result, RewardResult) if isinstance(result, dict) else result

    def _place(self, waiter: str) -> AbstractAsyncContextManager[None]:
        """Among those that are scored on the event loop."""
        if self._places is None:
            return nullcontext()
        return placed(self._places, waiter=waiter, resource="a place to be scored", holder=f"reward {self.name}")

    async def _in_time(self, score: Awaitable[Any], waiter: str) -> Any:
        """The score, or what too long a one is worth."""
        try:
            async with deadline(self._timeout_s, waiter=waiter, resource="its reward", holder=f"reward {self.name}"):
                return await score
        except Stalled as error:
            self.counts["score_timeouts"] += 1
            if self._timeout_reward is None:
                raise RewardFailure(f"no score within env.reward_timeout_s ({self._timeout_s:g} s)") from error
            return self._timeout_reward

    async def _prepare(self, host: Host) -> None:
        await host.make(MAKER, self.name, self._options)

    async def close(self) -> None:
        """End the reward workers, and what the reward itself holds."""
        await self._hosts.close()
        if is_async(self._reward) and hasattr(self._reward, "close"):
            await self._reward.close()


class Scorers:
    """The rewards of all environments of a worker; those that are the same share their reward workers."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError`."""
        self._scorers: dict[bytes, Scorer] = {}
        for settings in config.environments.by_key.values():
            if settings.reward is not None and _key(settings) not in self._scorers:
                self._scorers[_key(settings)] = Scorer(settings, num_workers=config.env.reward_workers)

    def of(self, settings: EnvironmentConfig) -> Scorer | None:
        """None if the environment gives the rewards itself."""
        return self._scorers[_key(settings)] if settings.reward is not None else None

    def counts(self) -> Counter[str]:
        """Of all scorers."""
        return sum((scorer.counts for scorer in self._scorers.values()), Counter())

    async def close(self) -> None:
        for scorer in self._scorers.values():
            await scorer.close()


@asynccontextmanager
async def scoring(config: Config) -> AsyncIterator[Scorers]:
    """For the length of the body."""
    scorers = Scorers(config)
    try:
        yield scorers
    finally:
        await scorers.close()


def _key(settings: EnvironmentConfig) -> bytes:
    """What makes a reward another one."""
    return msgspec.json.encode((settings.reward, settings.reward_options, settings.reward_timeout_s), order="sorted")
