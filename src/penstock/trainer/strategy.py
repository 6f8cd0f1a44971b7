"""How a model lies on the ranks: a replica on each, or a share of it on each (FSDP2).

Replicas add up gradients on their own and sum them once, when the step is taken. With shares every pass of one rank,
forward or backward, is one of all ranks: layers are gathered as they are needed, and gradients leave as shares. So
ranks with less to do take part with passes over nothing, and a prompt is not computed once for its siblings: what goes
through cached keys and values bypasses the layers' outputs, on which the gathering hangs.

In both, gradients are plain sums over the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from penstock.config import ConfigError, TrainerConfig
from penstock.trainer.lora import merged_weights
from penstock.trainer.packing import MicroBatch, idle
from penstock.trainer.ranks import Ranks
from penstock.trainer.shards import assign

SHARED = "begin with the same weights"
"""What ranks wait for each other to do."""


class Strategy(Protocol):
    """What depends on how the model lies on the ranks."""

    ranks: Ranks
    device: torch.device
    """On which this rank computes."""
    is_sharded: bool
    """Every rank has its own part to save, and every pass of one rank is one of all."""

    def place(self, module: Module) -> None:
        """Lay `module` over the ranks, in place, as rank 0 has it."""
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

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def place(self, module: Module) -> None:
        """What is not trained is the same on all of them from the start."""
        trained = [parameter.detach() for parameter in module.parameters() if parameter.requires_grad]
        self.ranks.share(trained, SHARED)

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

    def __init__(self, ranks: Ranks, policy: PreTrainedModel) -> None:
        """`ranks` have met. `policy` is without adapters. Raises `ConfigError` where torch is too old to add up
        gradients as they are."""
        assert ranks.device is not None
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ConfigError(
                f"trainer.distributed.strategy fsdp: torch {torch.__version__} only averages gradients of shares: take "
                "a newer one, or ddp"
            )
        self.ranks, self.device = ranks, ranks.device
        self._mesh = ranks.mesh(self.device)
        self._hollow = _hollow(policy)

    def place(self, module: Module) -> None:
        self._lay(module, {name: parameter.detach() for name, parameter in module.named_parameters()})

    def copied(self, policy: PreTrainedModel) -> PreTrainedModel:
        made = copy.deepcopy(self._hollow)
        self._lay(made, merged_weights(policy))
        return made

    def summed(self, parameters: Sequence[Parameter], *, in_place: bool) -> list[Tensor]:
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def passes(self, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[MicroBatch]:
        mine = list(micros)
        (most,) = self.ranks.largest([len(mine)], "agree on the number of micro-batches")
        yield from mine
        for _ in range(int(most) - len(mine)):
            yield idle(device)

    def _lay(self, module: Module, weights: Mapping[str, Tensor]) -> None:
        """Share `module` out, and have it hold `weights`, which are laid over the ranks already or rank 0's alone, and
        rank 0's buffers. What others have does not matter, and no device needs room for more than a share of all and a
        layer, unless the module was there."""
        buffers = dict(module.named_buffers())
        self._shard(module)
        module.to_empty(device=self.device)
        for name, buffer in module.named_buffers():
            buffer.copy_(self._everywhere(buffers[name]))
        for name, parameter in module.named_parameters():
            assign(parameter, self._everywhere(weights[name]))

    def _everywhere(self, tensor: Tensor) -> Tensor:
        """Whole, as rank 0 has it, unless every rank has its share of it."""
        if isinstance(tensor, DTensor):
            return tensor
        given = tensor.to(self.device) if self.ranks.is_first else torch.empty_like(tensor, device=self.device)
        self.ranks.share([given], SHARED)
        return given

    def _shard(self, module: Module) -> None:
        """Each of its layers is gathered on its own; a root that stayed gathered would miss changes of its weights."""
        for layer in (*_layers(module), module):
            fully_shard(layer, mesh=self._mesh, reshard_after_forward=True)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)


def is_sharded(config: TrainerConfig, ranks: Ranks) -> bool:
    """A rank that is alone has everything, whatever is configured."""
    return config.distributed.strategy == "fsdp" and ranks.size > 1


def strategy_of(policy: PreTrainedModel, config: TrainerConfig, ranks: Ranks) -> Strategy:
    """As configured, for a policy that is whole. Where it is to be sharded, wherever rank 0 has it and on no device
    (`meta`) on the others."""
    return Sharded(ranks, policy) if is_sharded(config, ranks) else Replicated(ranks, policy.device)


def _layers(module: Module) -> list[Module]:
    """The blocks that Transformers keeps together."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in module.modules() if type(part).__name__ in names]


def _hollow(policy: PreTrainedModel) -> PreTrainedModel:
    """A copy without weights, but with everything else."""
    parameters = dict.fromkeys(policy.parameters())
    without = {id(p): Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in parameters}
    return copy.deepcopy(policy, without)
