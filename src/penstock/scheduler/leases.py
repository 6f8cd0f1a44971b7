"""Work for workers: leases, first grants and seeds for members of a group. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.config import Config
from penstock.ports.work import Work
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.decoding import DecodingLimits
from penstock.seeding import stable_seed
from penstock.types import SegmentGrant, Task

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
        self._decoding = DecodingLimits(config)

    def work(self, group: ActiveGroup, members: Sequence[int], *, policy_version: int) -> Work:
        """Return work for `members` of `group`. Members with partial rollouts continue from them. `policy_version`: the
        one that the learner has trained."""
        task = group.task
        _, sampling = self._decoding.of(task)
        seed = stable_seed(self._config.seed, "sampling", task.purpose, task.tag, task.index, group.num_failures)
        saved = [(member, group.partial_rollouts[member]) for member in members if member in group.partial_rollouts]
        fresh = self._max_tokens(group, num_tokens=0)
        return Work(
            task=task,
            group=group.number,
            attempt=group.attempt,
            group_size=group.size - group.redundancy,
            redundancy=group.redundancy,
            members=tuple(members),
            max_tokens=tuple(
                self._max_tokens(group, num_tokens=group.num_tokens[member]) if member in group.num_tokens else fresh
                for member in members
            ),
            env_seed=env_seed(self._config, task),
            sampling_seed=seed,
            deadline_s=self._config.env.episode_timeout_s,
            sampling=sampling,
            saved=tuple(msgspec.structs.replace(each, episode=group.episode_id(member)) for member, each in saved),
            policy_version=policy_version,
            keep_text=task.purpose == "eval",
        )

    def grant(self, group: ActiveGroup, member: int) -> SegmentGrant:
        """Return the grant for the next generate call of `member`: its remaining budget, at most one segment."""
        max_tokens = self._max_tokens(group, num_tokens=group.num_tokens.get(member, 0))
        return SegmentGrant(episode=group.episode_id(member), max_tokens=max_tokens)

    def _max_tokens(self, group: ActiveGroup, *, num_tokens: int) -> int:
        """Return the tokens of the next grant of a member that has generated `num_tokens`."""
        segments, _ = self._decoding.of(group.task)
        return max(1, segments.grant_tokens(num_tokens=num_tokens))
