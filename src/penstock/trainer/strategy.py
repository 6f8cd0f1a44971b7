"""How a model lies on the ranks: a replica on each, or a share of it on each (FSDP2).

Replicas add up gradients on their own and sum them once, when the step is taken. With shares every pass of one rank,
forward or backward, is one of all ranks: layers are gathered as they are needed, and gradients leave as shares. So
ranks with less to do take part with passes over nothing, and a prompt is not computed once for its siblings: what goes
through cached keys and values bypasses the layers' outputs, on which the gathering hangs.

In both, gradients are plain sums over the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from penstock.config import ConfigError, TrainerConfig
from penstock.trainer.lora import merged_weights
from penstock.trainer.packing import MicroBatch, idle
from penstock.trainer.ranks import Ranks
from penstock.trainer.shards import assign


class Strategy(Protocol):
    """What depends on how the model lies on the ranks."""

    ranks: Ranks
    is_sharded: bool
    """Every rank has its own part to save, and every pass of one rank is one of all."""

    def place(self, module: Module) -> None:
        """Lay `module` over the ranks, in place; what they drew at random becomes rank 0's."""
        ...

    def copied(self, policy: PreTrainedModel) -> PreTrainedModel:
        """The policy as it is now, adapters merged or not; placed already."""
        ...

    def summed(self, parameters: Sequence[Parameter], *, in_place: bool) -> list[Tensor]:
        """The gradients of all ranks. Unless `in_place`, what is accumulated stays what it is."""
        ...

    def passes(self, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
        """This rank's micro-batches, and idle ones for as long as it must keep others company."""
        ...


class Replicated:
    """Every rank holds everything."""

    is_sharded = False

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def place(self, module: Module) -> None:
        self.ranks.share(_trained(module), "begin with the same weights")

    def copied(self, policy: PreTrainedModel) -> PreTrainedModel:
        return copy.deepcopy(policy)

    def summed(self, parameters: Sequence[Parameter], *, in_place: bool) -> list[Tensor]:
        if self.ranks.size > 1:
            self._complete(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.ranks.size > 1 and not in_place:
            gradients = [gradient.clone() for gradient in gradients]
        self.ranks.sum(gradients, "sum gradients")
        return gradients

    def passes(self, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
        yield from micros

    def _complete(self, parameters: Sequence[Parameter]) -> None:
        """A gradient that only others have is zero here."""
        has = self.ranks.largest([float(p.grad is not None) for p in parameters], "compare gradients")
        for parameter, anywhere in zip(parameters, has, strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class Sharded:
    """Every rank holds its share of each layer, of its gradient and of what the optimizer keeps of it."""

    is_sharded = True

    def __init__(self, ranks: Ranks, policy: PreTrainedModel, device: torch.device) -> None:
        """`policy` is whole, and without adapters. Raises `ConfigError` where torch is too old to add up gradients as
        they are."""
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ConfigError(
                f"trainer.distributed.strategy fsdp: torch {torch.__version__} only averages gradients of shares: take "
                "a newer one, or ddp"
            )
        self.ranks, self._device = ranks, device
        self._mesh = ranks.mesh(device)
        self._hollow = _hollow(policy)

    def place(self, module: Module) -> None:
        self.ranks.share(_trained(module), "begin with the same weights")
        self._shard(module)

    def copied(self, policy: PreTrainedModel) -> PreTrainedModel:
        made = copy.deepcopy(self._hollow)
        buffers = {name: buffer.clone() for name, buffer in made.named_buffers()}
        self._shard(made)
        made.to_empty(device=self._device)
        for name, buffer in made.named_buffers():
            buffer.copy_(buffers[name])
        weights = merged_weights(policy)
        for name, parameter in made.named_parameters():
            assign(parameter, weights[name])
        return made

    def summed(self, parameters: Sequence[Parameter], *, in_place: bool) -> list[Tensor]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def passes(self, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
        mine = list(micros)
        (most,) = self.ranks.largest([len(mine)], "agree on the number of micro-batches")
        yield from mine
        for _ in range(int(most) - len(mine)):
            yield idle(device)

    def _shard(self, module: Module) -> None:
        """Each of its layers is gathered on its own; a root that stayed gathered would miss changes of its weights."""
        for layer in (*_layers(module), module):
            fully_shard(layer, mesh=self._mesh, reshard_after_forward=True)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)


def strategy_of(policy: PreTrainedModel, config: TrainerConfig, ranks: Ranks) -> Strategy:
    """As configured, for a policy that is whole. A rank that is alone has everything, whatever is configured."""
    if config.distributed.strategy == "fsdp" and ranks.size > 1:
        return Sharded(ranks, policy, policy.device)
    return Replicated(ranks)


def _layers(module: Module) -> list[Module]:
    """The blocks that Transformers keeps together."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in module.modules() if type(part).__name__ in names]


def _trained(module: Module) -> list[Tensor]:
    return [parameter.detach() for parameter in module.parameters() if parameter.requires_grad]


def _hollow(policy: PreTrainedModel) -> PreTrainedModel:
    """A copy without weights, but with everything else."""
    parameters = dict.fromkeys(policy.parameters())
    without = {id(p): Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in parameters}
    return copy.deepcopy(policy, without)
