"""The policy as it was at some version, beside the present one: for the proximal policy of an objective, and for the
comparison with the engine.

A copy of all weights can be a model of its own. A copy of the trained weights alone has no model: for a pass of the
copy, its weights and those of the policy are exchanged. So adapters need no copy of their base, and a copy that is
rarely used can wait in main memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter, ParameterList
from transformers import PreTrainedModel

from penstock.trainer.lora import has_adapters
from penstock.trainer.shards import assign, load_parameters, local
from penstock.trainer.strategy import Strategy

AwaitCopy = Callable[[], None]
"""Waits until the weights may change, because a checkpoint is being copied."""


class PolicyCopy(ABC):
    """The policy at the version at which this object was made."""

    @contextmanager
    @abstractmethod
    def placed(self) -> Iterator[PreTrainedModel]:
        """Give the model for passes without gradients. They may come between a forward and a backward pass of the
        policy."""


class ParityCopy(PolicyCopy):
    """A copy of the trained weights in main memory."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._kept = [_in_main_memory(local(each)) for each in self._exchange.trained.values()]

    @contextmanager
    def placed(self) -> Iterator[PreTrainedModel]:
        with self._exchange.of(self._kept):
            yield self._exchange.policy


class Snapshot(PolicyCopy):
    """A copy that is renewed, and that is a part of checkpoints."""

    module: Module
    """What the copy keeps on the device."""

    @abstractmethod
    def renew(self) -> None:
        """Copy the present policy."""

    @abstractmethod
    def state_dict(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class WholeSnapshot(Snapshot):
    """A model of its own."""

    def __init__(self, policy: PreTrainedModel, strategy: Strategy) -> None:
        self._policy, self._copy = policy, strategy.copied(policy)
        self.module = self._copy

    @contextmanager
    def placed(self) -> Iterator[PreTrainedModel]:
        yield self._copy

    def renew(self) -> None:
        load_parameters(self._copy, dict(self._policy.named_parameters()))

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._copy.named_parameters())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_parameters(self._copy, state)


class AdapterSnapshot(Snapshot):
    """A copy of the adapters."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._adapters = exchange, exchange.trained
        kept = (Parameter(each.detach().clone(), requires_grad=False) for each in self._adapters.values())
        self.module = self._kept = ParameterList(kept)

    @contextmanager
    def placed(self) -> Iterator[PreTrainedModel]:
        with self._exchange.of([local(each) for each in self._kept]):
            yield self._exchange.policy

    def renew(self) -> None:
        self.load_state_dict({name: adapter.detach() for name, adapter in self._adapters.items()})

    def state_dict(self) -> dict[str, Tensor]:
        return {name: kept.detach() for name, kept in zip(self._adapters, self._kept, strict=True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, kept in zip(self._adapters, self._kept, strict=True):
            assign(kept, state[name])


def snapshot_of(exchange: Exchange, strategy: Strategy) -> Snapshot:
    """Return a snapshot of the policy."""
    policy = exchange.policy
    return AdapterSnapshot(exchange) if has_adapters(policy) else WholeSnapshot(policy, strategy)


class Exchange:
    """Exchanges the trained weights of a policy for others, for a while."""

    def __init__(self, policy: PreTrainedModel, strategy: Strategy, await_copy: AwaitCopy) -> None:
        """`policy` is placed with `strategy`."""
        self.policy = policy
        self.trained = {name: each for name, each in policy.named_parameters() if each.requires_grad}
        self._strategy, self._await_copy = strategy, await_copy

    @contextmanager
    def of(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Exchange this rank's parts of the weights for `others` during the body."""
        self._await_copy()
        self._swap(others)
        try:
            yield
        finally:
            self._swap(others)

    def _swap(self, others: Sequence[Tensor]) -> None:
        for weight, other in zip(self.trained.values(), others, strict=True):
            here, there = local(weight).data, other.data  # `data`: autograd finds later what it has seen before
            present = here.clone()
            here.copy_(there, non_blocking=True)
            there.copy_(present, non_blocking=True)
        self._strategy.changed()
        if others and here.device.type != "cpu":  # FSDP gathers shards on a stream that does not wait for this one
            torch.accelerator.current_stream(here.device).synchronize()


def _in_main_memory(tensor: Tensor) -> Tensor:
    copied = tensor.detach().to("cpu", copy=True)
    return copied.pin_memory() if tensor.is_cuda else copied
