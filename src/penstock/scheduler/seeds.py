"""Seeds of everything that is played, from nothing but the configuration and what is played. Pure.

All members of a group, and all attempts at it, meet the same world: the environment's seed is theirs together. What
they say there differs between members (`Work.leases` mixes these in), and after a failure; whoever goes on for a lost
worker says what that one would have said.
"""

from __future__ import annotations

from penstock.config import Config
from penstock.types import Task, stable_seed

COLLIDES = (
    "env.seeds arithmetic gives different tasks the same seed (seed + group + episode: 1 + 2 = 2 + 1); "
    "hashed seeds do not collide"
)


class Seeds:
    """Of environments and of sampling, by task."""

    def __init__(self, config: Config) -> None:
        self._seed, self._arithmetic = config.seed, config.env.seeds == "arithmetic"
        self._num_groups = config.trainer.groups_per_step

    def of_environment(self, task: Task) -> int:
        """Shared by all members of the task's group, and by all attempts."""
        if self._arithmetic:
            episode, group = divmod(task.index, self._num_groups)
            return self._seed + group + episode
        return stable_seed(self._seed, task.purpose, task.tag, task.index)

    def of_sampling(self, task: Task, num_failures: int) -> int:
        """Of the whole group, until it fails once more."""
        return stable_seed(self._seed, "sampling", task.purpose, task.tag, task.index, num_failures)
