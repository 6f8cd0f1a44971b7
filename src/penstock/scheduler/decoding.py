"""Token limits and sampling parameters of a task: those of its environment, and those that its row carries. Pure."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from penstock.config import Config
from penstock.row_settings import own_limit, own_temperature
from penstock.scheduler.segments import SegmentPolicy
from penstock.types import Purpose, Sampling, Task


class DecodingLimits:
    """Limits and sampling parameters by task."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._of_tag = cache(self._find)

    def of(self, task: Task) -> tuple[SegmentPolicy, Sampling]:
        """Return token limits and sampling parameters. Raises ValueError if those of the row are unusable."""
        segments, sampling = self._of_tag(task.tag, task.purpose)
        own = own_limit(task.payload)
        if own is not None and own < segments.max_new_tokens:
            segments, sampling = replace(segments, max_new_tokens=own), replace(sampling, max_new_tokens=own)
        if task.purpose == "train" and (temperature := own_temperature(task.payload)) is not None:
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
