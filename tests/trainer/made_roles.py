"""All roles of one rank, which get each other's results as `ActorCritic` passes them on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.trainer.critic import Critic, with_values
from penstock.trainer.learner import Learner
from penstock.trainer.rank_balancing import Work
from penstock.trainer.ranks import Ranks
from penstock.trainer.reference import Reference
from penstock.types import LearnerState

ENOUGH_S = 120.0
"""For files that are written beside training."""


class AllRoles:
    """The learner, and critic and reference where the settings need them."""

    def __init__(
        self,
        make_model: Callable[[], PreTrainedModel],
        config: TrainerConfig,
        *,
        max_staleness: int,
        ranks: Ranks | None = None,
        compute_dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        """`settings`: of the learner alone."""
        self._config, self._ranks = config, ranks or Ranks()
        common = {"max_staleness": max_staleness, "ranks": ranks, "compute_dtype": compute_dtype}
        self._reference = Reference(make_model(), config, **common) if "reference" in config.roles else None
        self._critic = Critic(make_model(), config, **common) if config.critic is not None else None
        self.learner = Learner(make_model(), config, **common, **settings)
        self._all = [role for role in (self.learner, self._critic, self._reference) if role is not None]

    @property
    def num_sharing(self) -> int:
        """How many ranks share their passes."""
        return self._config.distributed.context_ranks

    @property
    def policy_version(self) -> int:
        return self.learner.policy_version

    def accumulate(self, batch: Batch) -> dict[str, float]:
        if self._reference is not None:
            batch = batch.union(self._reference.logprobs(batch, self.policy_version))
        if self._critic is not None:
            batch = with_values(batch, self._critic.values(batch)["values"], self._config.critic)
            self._critic.learn(batch, self.policy_version)
        return self.learner.accumulate(batch)

    def work(self) -> Work:
        return self.learner.work()

    def step(self) -> LearnerState:
        learnt = self._critic.step() if self._critic is not None else {}
        state = self.learner.step()
        return dataclasses.replace(state, metrics=state.metrics | learnt)

    def named_weights(self) -> dict[str, torch.Tensor]:
        return self.learner.named_weights()

    def release(self) -> None:
        for role in self._all:
            role.release()

    def resume(self) -> None:
        for role in self._all:
            role.resume()

    def write(self, directory: Path) -> None:
        """Write the state of all roles on all ranks, and wait for the files."""
        for role in self._all:
            role.write(directory)
        assert all(role.is_written(ENOUGH_S) for role in self._all)
        self._ranks.total([0.0], "wait for all shards")
        self.learner.join_shards(directory)
        assert self.learner.is_written(ENOUGH_S)
        self._ranks.total([0.0], "wait for the joined shards")

    def read(self, directory: Path) -> None:
        for role in self._all:
            role.read(directory)
