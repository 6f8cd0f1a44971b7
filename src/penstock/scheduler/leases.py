"""Work for workers: leases, first grants and seeds for members of a group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import msgspec

from penstock.config import Config, Environments
from penstock.ports.work import Work
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.segments import SegmentPolicy
from penstock.seeding import stable_seed
from penstock.types import Purpose, Sampling, SegmentGrant, Task

COLLIDES = (
    "env.seeds arithmetic gives different tasks the same seed (seed + group + episode: 1 + 2 = 2 + 1); "
    "hashed seeds do not collide"
)


def env_seed(config: Config, task: Task) -> int:
    """Return the seed of the task's environment. All members and all attempts of a group share it."""
    if config.env.seeds == "arithmetic":
        episode, group = divmod(task.index, config.trainer.groups_per_step)
        return config.seed + group + episode
    return stable_seed(config.seed, task.purpose, task.tag, task.index)


class Leases:
    """Creates work and grants for workers.

    Seeds depend only on the configuration and the task. Members of a group share the environment's seed, and have
    different sampling seeds. An attempt after a failure has a new sampling seed. An attempt after the loss of a worker
    or of the trainer reproduces the same samples.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._limits = cache(partial(_limits, config, config.environments))

    def work(self, group: ActiveGroup, members: Sequence[int]) -> Work:
        """Return work for `members` of `group`. Members with partial rollouts continue from them."""
        task = group.task
        _, sampling = self._limits(task.tag, task.purpose)
        seed = stable_seed(self._config.seed, "sampling", task.purpose, task.tag, task.index, group.num_failures)
        saved = [(member, group.partial_rollouts[member]) for member in members if member in group.partial_rollouts]
        return Work(
            task=task,
            group=group.number,
            attempt=group.attempt,
            group_size=group.size - group.redundancy,
            redundancy=group.redundancy,
            members=tuple(members),
            max_tokens=tuple(self._max_tokens(group, member) for member in members),
            env_seed=env_seed(self._config, task),
            sampling_seed=seed,
            deadline_s=self._config.env.episode_timeout_s,
            sampling=sampling,
            saved=tuple(msgspec.structs.replace(each, episode=group.episode_id(member)) for member, each in saved),
            keep_text=task.purpose == "eval",
        )

    def grant(self, group: ActiveGroup, member: int) -> SegmentGrant:
        """Return the grant for the next generate call of `member`: its remaining budget, at most one segment."""
        return SegmentGrant(episode=group.episode_id(member), max_tokens=self._max_tokens(group, member))

    def _max_tokens(self, group: ActiveGroup, member: int) -> int:
        segments, _ = self._limits(group.task.tag, group.task.purpose)
        return max(1, segments.grant_tokens(num_tokens=group.num_tokens.get(member, 0)))


def _limits(config: Config, environments: Environments, tag: str, purpose: Purpose) -> tuple[SegmentPolicy, Sampling]:
    """Return token limits and sampling parameters for the tasks of one tag."""
    env, settings = config.env, environments.find(tag, purpose)
    if purpose == "eval":
        sampling = Sampling(temperature=settings.eval_temperature, max_new_tokens=settings.max_new_tokens)
    else:
        sampling = Sampling(
            temperature=env.temperature, top_p=env.top_p, top_k=env.top_k, max_new_tokens=settings.max_new_tokens
        )
    return SegmentPolicy.from_config(config, settings), sampling
