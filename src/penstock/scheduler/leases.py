"""What a worker is handed: leases, first grants and seeds for members of a group. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.config import Config
from penstock.ports import SavedEpisode, Work
from penstock.scheduler.live import LiveGroup
from penstock.scheduler.segments import SegmentPolicy
from penstock.types import EVAL_TAG, EpisodeId, Sampling, SegmentGrant, stable_seed


class Leases:
    """Makes work for workers. Members of a group share the environment's seed. An attempt after a failure samples
    differently; one after a loss (of a worker, of the trainer) samples the same again."""

    def __init__(self, config: Config) -> None:
        self._seed, self._deadline_s = config.seed, config.env.episode_timeout_s
        self._segments = SegmentPolicy.from_config(config)
        self._first_grant = self._segments.grant_tokens(num_tokens=0)
        env = config.env
        self._sampling = Sampling(
            temperature=env.temperature, top_p=env.top_p, top_k=env.top_k, max_new_tokens=env.max_new_tokens
        )
        self._eval_sampling = Sampling(temperature=env.eval_temperature, max_new_tokens=env.max_new_tokens)

    def work(self, group: LiveGroup, members: Sequence[int]) -> Work:
        """`members` of `group`, those that were saved from where they were."""
        task = group.task
        evaluating = task.tag == EVAL_TAG
        return Work(
            task=task,
            group=group.number,
            attempt=group.attempt,
            group_size=group.size,
            members=tuple(members),
            max_tokens=self._first_grants(group, members),
            env_seed=stable_seed(self._seed, task.tag, task.index),
            sampling_seed=stable_seed(self._seed, task.tag, task.index, group.num_failures),
            deadline_s=self._deadline_s,
            sampling=self._eval_sampling if evaluating else self._sampling,
            saved=self._saved(group, members) if group.saved else (),
            keep_text=evaluating,
        )

    def grant(self, group: LiveGroup, member: int) -> SegmentGrant:
        """The next generate call of a member: what is left of its budget, up to a segment."""
        return SegmentGrant(episode=self._episode(group, member), max_tokens=self._max_tokens(group, member))

    def _first_grants(self, group: LiveGroup, members: Sequence[int]) -> tuple[int, ...]:
        if not group.num_tokens:
            return (self._first_grant,) * len(members)
        return tuple(self._max_tokens(group, member) for member in members)

    def _max_tokens(self, group: LiveGroup, member: int) -> int:
        return max(1, self._segments.grant_tokens(num_tokens=group.num_tokens.get(member, 0)))

    @staticmethod
    def _episode(group: LiveGroup, member: int) -> EpisodeId:
        return EpisodeId(group.task.tag, group.number, member, group.attempt)

    @classmethod
    def _saved(cls, group: LiveGroup, members: Sequence[int]) -> tuple[SavedEpisode, ...]:
        """What is saved of `members`, under the names they go on with."""
        mine = [(member, group.saved[member]) for member in members if member in group.saved]
        return tuple(msgspec.structs.replace(saved, episode=cls._episode(group, member)) for member, saved in mine)
