"""Token limits and sampling parameters of a task: those of its environment, and those that its row carries. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from penstock.config import Config, ConfigError
from penstock.scheduler.segments import SegmentPolicy
from penstock.types import Purpose, Sampling, Task

MAX_NEW_TOKENS = "max_new_tokens"
"""Key of a row that bounds the tokens per turn of its task, below the bound of its environment."""
TEMPERATURE = "temperature"
"""Key of a row with the sampling temperature of its task in training, instead of that of the run."""
COLDEST, HOTTEST = 1e-3, 2.0
"""Bounds of a temperature of a row. Greedy tokens have no log-probabilities that could be trained, and a hotter one is
more likely a number about the weather."""


class DecodingLimits:
    """Limits and sampling parameters by task."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._of_tag = cache(self._find)

    def of(self, task: Task) -> tuple[SegmentPolicy, Sampling]:
        """Return token limits and sampling parameters. Raises ConfigError if the row's own limit is no number of
        tokens, or its temperature cannot be trained."""
        segments, sampling = self._of_tag(task.tag, task.purpose)
        own = own_limit(task.payload, task.task_id)
        if own is not None and own < segments.max_new_tokens:
            segments, sampling = replace(segments, max_new_tokens=own), replace(sampling, max_new_tokens=own)
        if task.purpose == "train" and (temperature := own_temperature(task.payload, task.task_id)) is not None:
            sampling = replace(sampling, temperature=temperature)
        return segments, sampling

    def max_episode_tokens(self, task: Task) -> int:
        """Return the most tokens that an episode of the task may generate."""
        segments, _ = self.of(task)
        return segments.max_episode_tokens

    def temperature(self, task: Task) -> float:
        """Return the temperature at which the actions of the task are sampled."""
        _, sampling = self.of(task)
        return sampling.temperature

    def _find(self, tag: str, purpose: Purpose) -> tuple[SegmentPolicy, Sampling]:
        config, env = self._config, self._config.env
        settings = config.environments.find(tag, purpose)
        if purpose == "eval":
            sampling = Sampling(temperature=settings.eval_temperature, max_new_tokens=settings.max_new_tokens)
        else:
            sampling = Sampling(
                temperature=env.temperature, top_p=env.top_p, top_k=env.top_k, max_new_tokens=settings.max_new_tokens
            )
        return SegmentPolicy.from_config(config, settings), sampling


def own_limit(payload: Mapping[str, Any], task_id: str) -> int | None:
    """Return the limit that a row carries. Raises ConfigError if it is no positive whole number."""
    limit = payload.get(MAX_NEW_TOKENS)
    if limit is None:
        return None
    if type(limit) is not int or limit < 1:
        raise ConfigError(
            f"data: {MAX_NEW_TOKENS} of task {task_id} is {limit!r}: it must be a whole number above zero"
        )
    return limit


def own_temperature(payload: Mapping[str, Any], task_id: str) -> float | None:
    """Return the temperature that a row carries. Raises ConfigError if it cannot be trained."""
    temperature = payload.get(TEMPERATURE)
    if temperature is None:
        return None
    if type(temperature) not in (int, float) or not COLDEST <= temperature <= HOTTEST:
        raise ConfigError(
            f"data: {TEMPERATURE} of task {task_id} is {temperature!r}: it must be a number from {COLDEST:g} to "
            f"{HOTTEST:g}"
        )
    return float(temperature)
