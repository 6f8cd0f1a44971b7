"""What a worker is handed: leases, first grants and seeds for members of a group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import msgspec

from penstock.config import Config, Environments
from penstock.ports import SavedEpisode, Work
from penstock.scheduler.live import LiveGroup
from penstock.scheduler.seeds import Seeds
from penstock.scheduler.segments import SegmentPolicy
from penstock.types import EpisodeId, Purpose, Sampling, SegmentGrant


@dataclass(frozen=True, slots=True, kw_only=True)
class _Terms:
    """On which the tasks of a tag are played."""

    segments: SegmentPolicy
    first_grant: int
    """Tokens."""
    sampling: Sampling


class Leases:
    """Makes work for workers. Members of a group share the environment's seed. An attempt after a failure samples
    differently; one after a loss (of a worker, of the trainer) samples the same again."""

    def __init__(self, config: Config) -> None:
        self._deadline_s, self._seeds = config.env.episode_timeout_s, Seeds(config)
        self._terms = cache(partial(_terms, config, config.environments))

    def work(self, group: LiveGroup, members: Sequence[int]) -> Work:
        """`members` of `group`, those that were saved from where they were."""
        task, terms = group.task, self._terms_of(group)
        return Work(
            task=task,
            group=group.number,
            attempt=group.attempt,
            group_size=group.size - group.redundancy,
            redundancy=group.redundancy,
            members=tuple(members),
            max_tokens=self._first_grants(group, members),
            env_seed=self._seeds.of_environment(task),
            sampling_seed=self._seeds.of_sampling(task, group.num_failures),
            deadline_s=self._deadline_s,
            sampling=terms.sampling,
            saved=self._saved(group, members) if group.saved else (),
            keep_text=task.purpose == "eval",
        )

    def grant(self, group: LiveGroup, member: int) -> SegmentGrant:
        """The next generate call of a member: what is left of its budget, up to a segment."""
        return SegmentGrant(episode=self._episode(group, member), max_tokens=self._max_tokens(group, member))

    def _terms_of(self, group: LiveGroup) -> _Terms:
        return self._terms(group.task.tag, group.task.purpose)

    def _first_grants(self, group: LiveGroup, members: Sequence[int]) -> tuple[int, ...]:
        if not group.num_tokens:
            return (self._terms_of(group).first_grant,) * len(members)
        return tuple(self._max_tokens(group, member) for member in members)

    def _max_tokens(self, group: LiveGroup, member: int) -> int:
        segments = self._terms_of(group).segments
        return max(1, segments.grant_tokens(num_tokens=group.num_tokens.get(member, 0)))

    @staticmethod
    def _episode(group: LiveGroup, member: int) -> EpisodeId:
        return EpisodeId(group.task.tag, group.number, member, group.attempt)

    @classmethod
    def _saved(cls, group: LiveGroup, members: Sequence[int]) -> tuple[SavedEpisode, ...]:
        """What is saved of `members`, under the names they go on with."""
        mine = [(member, group.saved[member]) for member in members if member in group.saved]
        return tuple(msgspec.structs.replace(saved, episode=cls._episode(group, member)) for member, saved in mine)


def _terms(config: Config, environments: Environments, tag: str, purpose: Purpose) -> _Terms:
    env, settings = config.env, environments.find(tag, purpose)
    segments = SegmentPolicy.from_config(config, settings)
    if purpose == "eval":
        sampling = Sampling(temperature=settings.eval_temperature, max_new_tokens=settings.max_new_tokens)
    else:
        sampling = Sampling(
            temperature=env.temperature, top_p=env.top_p, top_k=env.top_k, max_new_tokens=settings.max_new_tokens
        )
    return _Terms(segments=segments, first_grant=segments.grant_tokens(num_tokens=0), sampling=sampling)
