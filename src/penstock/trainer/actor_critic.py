"""The driver of actor, critic and reference: it passes data between these roles, wherever they are placed.

```
 batch ─► split over ranks ─► reference.logprobs ─► critic.values ─► advantages ─► critic.learn   (beside each other,
                                                                               └─► actor.accumulate  where they can be)
```

Critic and reference are optional. Every role has as many ranks as the actor, and rank i of each role sees the same
samples. So do ranks that share their passes (`trainer.distributed.context_ranks`). Neither the calls nor their results
depend on the placement of the roles.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.groups.fused import Roles
from penstock.trainer.critic import whitened, with_values
from penstock.trainer.packing import PASSES
from penstock.trainer.rank_balancing import Work, split_over_ranks
from penstock.types import LearnerState

INPUTS = ("token_ids", "loss_mask", "versions", "temperatures", PASSES)
"""Columns that critic and reference need, if the batch has them."""


class ActorCritic:
    """The trainer as a whole: calls like those of one rank's `Learner`, made on all ranks of all roles."""

    def __init__(self, roles: Roles, config: TrainerConfig) -> None:
        """`roles`: `actor`, and `critic` and `reference` if the configuration needs them."""
        self._roles, self._config = roles, config
        self._actor: Any = roles.actor
        self._critic: Any = getattr(roles, "critic", None)
        self._reference: Any = getattr(roles, "reference", None)
        self._others: list[Any] = [role for role in (self._critic, self._reference) if role is not None]
        self.policy_version = 0
        """The version that is being trained."""
        self._others_s = 0.0
        """Seconds of model compute of critic and reference since the last step."""
        self._has_begun = self._is_released = False
        self._to_join: Path | None = None
        """Where all ranks write shards that one of them will join."""

    def imitate(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        """Take one step of the warm start."""
        return dict(self._actor.imitate(batch, learning_rate))

    def begin(self, policy_version: int, directory: Path) -> None:
        """Give the current policy this version, and initialize critic and reference from it.

        The actor writes the policy to `directory`, which all ranks can read. The directory is removed afterwards.
        """
        self._actor.begin(policy_version)
        self.policy_version = policy_version
        if self._others:
            try:
                self._actor.write_policy(directory)
                self._begin_others(directory)
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    def accumulate(self, batch: Batch) -> dict[str, float]:
        """Add the gradients of a batch from `prepare`; see `Learner.accumulate`."""
        parts, size, shared = [batch], self._actor.size, self._config.distributed.context_ranks
        if size > 1:
            parts = split_over_ranks(batch, size // shared, self._work)
            parts = [part for part in parts for _ in range(shared)]
        inputs = [part.keep(name for name in INPUTS if name in part.names) for part in parts]
        logprobs = self._reference.logprobs(inputs, self.policy_version) if self._reference else None
        values = self._critic.values(inputs) if self._critic else None
        if logprobs is not None:
            parts = [part.union(reference) for part, reference in zip(parts, logprobs.result(), strict=True)]
        learning = None
        if values is not None and self._config.critic is not None:
            valued = zip(parts, values.result(), strict=True)
            parts = [with_values(part, computed["values"], self._config.critic) for part, computed in valued]
            learning = self._critic.learn(parts, self.policy_version)
            parts = whitened(parts) if self._config.critic.whiten else parts
        counted: dict[str, float] = self._actor.accumulate(parts)
        if learning is not None:
            learning.result()
        return counted | {"busy_s": self._process_mean(counted["busy_s"] + self._take_busy_s())}

    def step(self) -> LearnerState:
        """Take one optimizer step; see `Learner.step`. The metrics include those of the critic's step."""
        learnt = self._critic.step() if self._critic else None
        state: LearnerState = self._actor.step()
        metrics = state.metrics | (learnt.result() if learnt is not None else {})
        self._take_busy_s()
        metrics["busy_s"] = self._process_mean(metrics["busy_s"] + self._others_s)
        self._others_s, self.policy_version = 0.0, state.policy_version
        return replace(state, metrics=metrics)

    def publish(self) -> Path:
        """Begin to write the weights in the format that servers load, and return the folder where their handle will
        be."""
        opened = self._actor.open_weights()
        self._actor.publish(opened)
        folder: Path = opened.folder
        return folder

    def write(self, directory: Path) -> None:
        """Begin to write the complete state of all roles at the last step boundary as files."""
        for role in (self._actor, *self._others):
            role.write(directory)
        self._to_join = directory

    def is_written(self) -> bool:
        """Return whether what `write` began is complete. Raises the error of a rank that could not write."""
        if not all(role.is_written() for role in (self._actor, *self._others)):
            return False
        if self._to_join is not None:
            directory, self._to_join = self._to_join, None
            self._actor.join_shards(directory)
            return bool(self._actor.is_written())
        return True

    def read(self, directory: Path, policy_version: int) -> None:
        """Restore the state that `write` wrote, under any placement of roles, as version `policy_version`."""
        self._actor.read(directory, policy_version)
        if not self._has_begun:
            self._begin_others(directory)
        for role in self._others:
            role.read(directory)
        self._take_busy_s()
        self.policy_version, self._others_s = policy_version, 0.0

    def release(self) -> None:
        """Free the devices of all roles until `resume`.

        The state moves to the machines' main memory. It can be published and written from there.
        """
        if not self._is_released:
            for role in (self._actor, *self._others):
                role.release()
            self._is_released = True

    def resume(self) -> None:
        """Move the state back to the devices. Call this before any compute or `read`."""
        if self._is_released:
            for role in (self._actor, *self._others):
                role.resume()
            self._is_released = False

    def close(self) -> None:
        """End all ranks of all roles."""
        self._roles.close()

    def _begin_others(self, directory: Path) -> None:
        """Initialize critic and reference from the policy in `directory`."""
        for role in self._others:
            role.load(directory)
            role.begin()
        self._has_begun = True

    def _take_busy_s(self) -> float:
        """Return the seconds of model compute of critic and reference since the last call."""
        seconds = sum(float(role.busy_s()) for role in self._others)
        self._others_s += seconds
        return seconds

    def _process_mean(self, seconds: float) -> float:
        """Return the mean over all processes. `seconds` is the sum over roles of each role's mean over its ranks."""
        return seconds / self._roles.num_places

    @cached_property
    def _work(self) -> Work:
        work: Work = self._actor.work()
        return work
