"""One rank of the trainer: everything that touches the model, as methods that the trainer process calls on all ranks.

A call is made on all ranks at once, in the same order; within it they may wait for each other. Who has nothing to train
takes part with an empty batch.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config import Config
from penstock.groups.batch import Batch
from penstock.groups.collect import add, first, reduce
from penstock.groups.intent import PerRank, Shard
from penstock.groups.local import LocalGroup
from penstock.groups.method import remote_method
from penstock.groups.modes import Execute
from penstock.groups.role import Rank
from penstock.groups.spawned import SpawnedGroup
from penstock.model.load import load_policy, resolve_device, resolve_dtype, with_tied_names
from penstock.processes.cores import num_threads, num_usable_cpus
from penstock.scheduler.segments import max_trained_tokens
from penstock.supervisor.child import ADDRESS
from penstock.trainer.dealing import attention_per_token
from penstock.trainer.learner import Learner
from penstock.trainer.ranks import Meeting, Ranks
from penstock.trainer.warm_start import Imitation
from penstock.types import LearnerState, WeightsHandle
from penstock.weights.shared_memory import WeightsPublisher

LOOPBACK = "127.0.0.1"


class TrainerRank:
    """Holds the policy from the start; it becomes the learner's with the first call that needs one."""

    def __init__(self, rank: Rank, *, config: Config, model_dir: Path, weights_dir: Path) -> None:
        """`model_dir`: of the policy. `weights_dir`: where rank 0 publishes."""
        self._config, self._ranks = config, Ranks(rank)
        self._num_here = _num_here(rank, config)
        self._set_threads()
        self._device = _device_of(rank, resolve_device(config.model.device))
        self._dtype = resolve_dtype(config.model.dtype, self._device)
        self._model = load_policy(model_dir, device=self._device, weights=config.model.path != "tiny", seed=config.seed)
        self._publisher = WeightsPublisher(weights_dir) if self._ranks.is_first else None
        self._first_version = 0

    @remote_method(execute=Execute.RANK_ZERO)
    def listen(self) -> Meeting:
        """Where the others find this rank."""
        return self._ranks.listen(os.environ.get(ADDRESS, LOOPBACK))

    @remote_method()
    def meet(self, meeting: Meeting) -> None:
        """Comes before everything else where there are several ranks."""
        backend = self._config.trainer.distributed.backend
        self._ranks.meet(meeting, self._device, backend, address=os.environ.get(ADDRESS))

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
        """Nobody else computes meanwhile: it has all cores."""
        torch.set_num_threads(max(torch.get_num_threads(), num_usable_cpus() // self._num_here))
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

    def _served(self, gathered: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {name: tensor.to(self._dtype) for name, tensor in gathered.items()}
        return with_tied_names(self._model, named) if self._config.rollout.engine == "vllm" else named

    def _set_threads(self) -> None:
        threads = num_threads(self._config, self._config.trainer.torch_threads, num_sharing=self._num_here)
        torch.set_num_threads(threads)


def trainer_group(
    num_ranks: int,
    *,
    config: Config,
    model_dir: Path,
    weights_dir: Path,
    elsewhere: Sequence[socket.socket] = (),
) -> LocalGroup | SpawnedGroup:
    """One rank in this process, or several in processes of their own, that have met: the last ones where `elsewhere`
    leads to."""
    init: dict[str, Any] = {"config": config, "model_dir": model_dir, "weights_dir": weights_dir}
    if num_ranks == 1:
        return LocalGroup(TrainerRank, **init)
    group = SpawnedGroup(TrainerRank, num_ranks, elsewhere=elsewhere, **init)
    try:
        group.meet(group.listen())
    except BaseException:
        group.close()
        raise
    return group


def _num_here(rank: Rank, config: Config) -> int:
    """Ranks on the node of this one, with it."""
    shares = config.ranks_by_node
    return next((share for share, end in zip(shares, accumulate(shares), strict=True) if rank.index < end), rank.size)


def _device_of(rank: Rank, device: torch.device) -> torch.device:
    """A rank's own among those that its process sees, unless one was chosen."""
    if device.type == "cpu" or device != torch.device(device.type) or rank.size == 1:
        return device
    own = torch.device(device.type, rank.index % torch.accelerator.device_count())
    torch.accelerator.set_device_index(own)
    return own
