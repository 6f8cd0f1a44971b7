"""What a worker is handed: leases, first grants and seeds for members of a group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.config import Config
from penstock.ports import SavedEpisode, Work
from penstock.scheduler.live import LiveGroup
from penstock.scheduler.segments import SegmentPolicy
from penstock.types import EVAL_TAG, EpisodeId, EpisodeLease, Sampling, SegmentGrant, stable_seed


class Leases:
    """Makes work for workers. Members of a group share the environment's seed; attempts differ in how they sample."""

    def __init__(self, config: Config) -> None:
        self._seed, self._env = config.seed, config.env
        self._segments = SegmentPolicy.from_config(config)

    def work(self, group: LiveGroup, members: Sequence[int]) -> Work:
        """`members` of `group`, those that were saved from where they were."""
        evaluating = group.task.tag == EVAL_TAG
        temperature = self._env.eval_temperature if evaluating else self._env.temperature
        return Work(
            task=group.task,
            group_size=group.size,
            leases=tuple(self._lease(group, member) for member in members),
            grants=tuple(self.grant(group, member) for member in members),
            sampling=Sampling(temperature=temperature, max_new_tokens=self._env.max_new_tokens),
            saved=tuple(self._now(group, group.saved[member]) for member in members if member in group.saved),
            keep_text=evaluating,
        )

    def grant(self, group: LiveGroup, member: int) -> SegmentGrant:
        """The next generate call of a member: what is left of its budget, up to a segment."""
        tokens = self._segments.grant_tokens(num_tokens=group.num_tokens.get(member, 0))
        return SegmentGrant(episode=self._episode(group, member), max_tokens=max(1, tokens))

    def _lease(self, group: LiveGroup, member: int) -> EpisodeLease:
        task, attempt = group.task, group.attempt
        return EpisodeLease(
            episode=self._episode(group, member),
            env_seed=stable_seed(self._seed, task.tag, task.index),
            sampling_seed=stable_seed(self._seed, task.tag, task.index, member, attempt),
            deadline_s=self._env.episode_timeout_s,
        )

    @staticmethod
    def _episode(group: LiveGroup, member: int) -> EpisodeId:
        return EpisodeId(group.task.tag, group.number, member, group.attempt)

    @classmethod
    def _now(cls, group: LiveGroup, saved: SavedEpisode) -> SavedEpisode:
        """A saved episode under the name it goes on with."""
        return replace(saved, episode=cls._episode(group, saved.episode.episode))
