"""One rank of the trainer's actor: the policy that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import Config
from penstock.groups.batch import Batch
from penstock.groups.collect import add, first, reduce
from penstock.groups.intent import PerRank, Shard
from penstock.groups.method import remote_method
from penstock.groups.modes import Execute
from penstock.groups.role import Rank
from penstock.model.load import with_tied_names
from penstock.processes.cores import num_usable_cpus
from penstock.processes.rank import TrainerRank
from penstock.scheduler.segments import max_trained_tokens
from penstock.trainer.dealing import attention_per_token
from penstock.trainer.learner import Learner
from penstock.trainer.warm_start import Imitation
from penstock.types import LearnerState, WeightsHandle
from penstock.weights.shared_memory import WeightsPublisher


class Actor(TrainerRank):
    """Holds the policy from the start; it becomes the learner's with the first call that needs one."""

    def __init__(
        self, rank: Rank, roles: Mapping[str, Any], *, config: Config, place: int, model_dir: Path, weights_dir: Path
    ) -> None:
        """`model_dir`: of the policy. `weights_dir`: where rank 0 publishes. The others: see `TrainerRank`."""
        super().__init__(rank, roles, config=config, place=place)
        trains_first = config.model.warm_start.steps > 0
        self._model = self._policy(model_dir, weights=config.model.path != "tiny", whole=trains_first)
        self._publisher = WeightsPublisher(weights_dir) if self._ranks.is_first else None
        self._first_version = 0

    @remote_method(execute=Execute.RANK_ZERO)
    def attention_per_token(self) -> float:
        """See `penstock.trainer.dealing`."""
        return attention_per_token(self._model)

    @remote_method(dispatch={"batch": Shard(uneven="allow")}, collect=reduce(add))
    def imitate(self, batch: Batch, learning_rate: float) -> dict[str, float]:
        """One step of the warm start."""
        return self._imitation.step(batch, learning_rate)

    @remote_method()
    def begin(self, policy_version: int) -> None:
        """What the policy is now has this version; the warm start, if there was one, is over."""
        self._first_version = policy_version
        self.__dict__.pop("_imitation", None)
        self._set_threads()

    @remote_method(dispatch={"batch": PerRank()}, collect=reduce(add))
    def accumulate(self, batch: Batch) -> dict[str, float]:
        """See `Learner.accumulate`."""
        return self._learner.accumulate(batch)

    @remote_method(collect=first)
    def step(self) -> LearnerState:
        """See `Learner.step`."""
        return self._learner.step()

    @remote_method(collect=first)
    def publish(self) -> WeightsHandle | None:
        """Write the weights as servers load them: gathered from all ranks, written by rank 0."""
        gathered = self._learner.named_weights()
        if self._publisher is None:
            return None
        return self._publisher.publish(self._served(gathered), self._learner.policy_version)

    @remote_method()
    def write_policy(self, directory: Path) -> None:
        """See `Learner.write_policy`."""
        self._learner.write_policy(directory)

    @remote_method()
    def write(self, directory: Path) -> None:
        """See `Learner.write`."""
        self._learner.write(directory)

    @remote_method()
    def read(self, directory: Path, policy_version: int) -> None:
        """Go back to what `write` wrote; it counts as `policy_version` from now on."""
        self._learner.read(directory)
        self._learner.policy_version = policy_version

    @cached_property
    def _imitation(self) -> Imitation:
        """Nobody else computes meanwhile: the actor's ranks have all cores."""
        num_sharing = sum(number < self._ranks.size for number in self._here)
        torch.set_num_threads(max(torch.get_num_threads(), num_usable_cpus() // num_sharing))
        return Imitation(self._model, self._ranks)

    @cached_property
    def _learner(self) -> Learner:
        """Made after the warm start, which trains the whole model and leaves no optimizer state behind."""
        config = self._config
        return Learner(
            self._model,
            config.trainer,
            max_staleness=config.scheduler.max_staleness,
            policy_version=self._first_version,
            temperature=config.env.temperature,
            max_tokens=max_trained_tokens(config),
            whole_step=config.trainer.groups_per_step * config.env.group_size,
            compute_dtype=self._dtype,
            measure_noise=config.scheduler.trigger.feedback.signal == "noise_scale",
            ranks=self._ranks,
        )

    @property
    def _tenant(self) -> Learner:
        return self._learner

    def _served(self, gathered: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {name: tensor.to(self._dtype) for name, tensor in gathered.items()}
        return with_tied_names(self._model, named) if self._config.rollout.engine == "vllm" else named
