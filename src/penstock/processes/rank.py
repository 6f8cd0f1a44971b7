"""One rank of a role of the trainer: everything that touches a model, as methods that are called on all ranks.

A call is made on all ranks at once, in the same order; within it they may wait for each other. Who has nothing to do
takes part with an empty batch. Roles that share processes are one and the same group of ranks.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from operator import add
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from transformers import PreTrainedModel

from penstock.config import Config
from penstock.groups.collect import reduce
from penstock.groups.method import remote_method
from penstock.groups.modes import Execute
from penstock.groups.role import Rank
from penstock.model.load import hollow_policy, load_policy, resolve_dtype
from penstock.processes.cores import num_threads
from penstock.processes.devices import device_of
from penstock.processes.layout import trainer_nodes
from penstock.supervisor.child import ADDRESS
from penstock.trainer.critic import Critic
from penstock.trainer.learner import Learner
from penstock.trainer.ranks import Meeting, Ranks
from penstock.trainer.reference import Reference
from penstock.trainer.strategy import is_sharded

LOOPBACK = "127.0.0.1"
Held = TypeVar("Held", Critic, Reference)


class TrainerRank(ABC):
    """What all roles have."""

    def __init__(self, rank: Rank, roles: Mapping[str, Any], *, config: Config, place: int) -> None:
        """`roles`: those that this process has already. `place`: which of the trainer's places it belongs to."""
        self._config = config
        beside: TrainerRank | None = next(iter(roles.values()), None)
        self._ranks: Ranks = Ranks(rank) if beside is None else beside._ranks
        number = place * rank.size + rank.index
        self._here = _here(number, config)
        self._device = device_of(number, config)
        self._dtype = resolve_dtype(config.model.dtype, self._device)
        self._set_threads()

    @remote_method(execute=Execute.RANK_ZERO)
    def listen(self) -> Meeting:
        """Where the others find this rank."""
        return self._ranks.listen(os.environ.get(ADDRESS, LOOPBACK))

    @remote_method()
    def meet(self, meeting: Meeting) -> None:
        """Comes before everything else where there are several ranks; one of a process's roles is asked."""
        backend = self._config.trainer.distributed.backend
        self._ranks.meet(meeting, self._device, backend, address=os.environ.get(ADDRESS))

    @remote_method()
    def release(self) -> None:
        """Let others have the device until `resume`; the CPU is everybody's anyway."""
        if self._device.type != "cpu":
            self._tenant.release()
            torch.get_device_module(self._device).empty_cache()

    @remote_method()
    def resume(self) -> None:
        """Take back the device that was released."""
        if self._device.type != "cpu":
            self._tenant.resume()

    @property
    @abstractmethod
    def _tenant(self) -> Learner | Critic | Reference:
        """Who holds what this role has on the device."""

    def _policy(self, directory: Path, *, weights: bool = True, whole: bool = False) -> PreTrainedModel:
        """As `strategy_of` takes it: to be sharded, rank 0 alone reads it, and no device need have room for it, unless
        it is wanted `whole`. Without `weights`: random ones."""
        if whole or not is_sharded(self._config.trainer, self._ranks):
            return load_policy(directory, device=self._device, weights=weights, seed=self._config.seed)
        if self._ranks.is_first:
            return load_policy(directory, weights=weights, seed=self._config.seed)
        return hollow_policy(directory)

    def _set_threads(self) -> None:
        threads = num_threads(self._config, self._config.trainer.torch_threads, num_sharing=len(self._here))
        torch.set_num_threads(threads)


class BesideActor(TrainerRank, Generic[Held]):
    """A role with a model of its own, which began as the policy."""

    _held: Held
    """From `begin` on."""
    _loaded: PreTrainedModel
    """Between `load` and `begin`."""

    @remote_method()
    def load(self, directory: Path) -> None:
        """The policy in `directory`. Ranks do not meet in this: the first may have to read for longer than others would
        wait for it."""
        self._loaded = self._policy(directory)

    @remote_method()
    def begin(self) -> None:
        """As the policy that was loaded."""
        self._held = self._make(self._loaded)
        del self._loaded

    @remote_method()
    def read(self, directory: Path) -> None:
        """Go back to what `write` wrote beside a policy."""
        self._held.read(directory)

    @remote_method()
    def write(self, directory: Path) -> None:
        """Save everything that decides the future, as files."""
        self._held.write(directory)

    @remote_method(collect=reduce(add))
    def busy_s(self) -> float:
        """Model compute since this was last asked, in seconds: of this rank its share of the mean."""
        return self._held.busy.told() / self._ranks.size

    @property
    def _tenant(self) -> Held:
        return self._held

    @abstractmethod
    def _make(self, policy: PreTrainedModel) -> Held: ...


def _here(number: int, config: Config) -> range:
    """Of the trainer's processes, those on the node of the one with this number, with it."""
    return next(node.numbers for node in trainer_nodes(config) if number in node.numbers)
