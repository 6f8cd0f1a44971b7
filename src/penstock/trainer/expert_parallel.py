"""Experts that stay on their ranks (expert parallelism): tokens travel to the experts, not experts to the tokens.

    router ─► (token, expert) pairs by expert ─► exchange ─► experts of this rank ─► exchange ─► weighted sums

The ranks that share one copy of a model each hold equally many of the experts of every layer, whole and in order. As
runs of rows of one tensor these are the shards that FSDP would make, so checkpoints, publishing and the optimizer need
not know. FSDP leaves them alone: no rank gathers them. Their gradients need no sum over these ranks, because the
tokens of all ranks have come to the rank that has the expert.

Every rank makes the same exchanges in the same order, also a rank without samples, or with experts that no token was
sent to. Activation checkpointing repeats the exchanges in the backward pass.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn import Module, Parameter
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from penstock.model.experts import experts_of

SPREAD = "penstock_spread"
"""Name of the function in Transformers that computes experts of several ranks, and of its attribute of modules."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How the experts of a layer are spread over ranks, and how each rank computes its own."""

    size: int
    """Of the group."""
    group: distributed.ProcessGroup
    dtype: torch.dtype
    """Of the rows that travel, and of the experts' products."""
    usual: str
    """Name of the function of Transformers that would compute the experts of one rank alone."""

    def computed(self, experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of each token's experts with its weights. [T, H], [T, K], [T, K] -> [T, H]"""
        (num_tokens, width), per_token = hidden.shape, chosen.shape[1]
        ids, order = torch.sort(chosen.reshape(-1), stable=True)
        arriving, sent, received = self._counted(ids, experts.num_experts)
        rows = self._exchanged(hidden[order // per_token].to(self.dtype), sent, received)
        rows = self._exchanged(self._of_own(experts, rows, arriving), received, sent)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        found = rows[places].view(num_tokens, per_token, width) * weights.unsqueeze(-1)
        return found.sum(dim=1).to(hidden.dtype)

    def _counted(self, ids: Tensor, num_experts: int) -> tuple[Tensor, list[int], list[int]]:
        """Return how many rows arrive from each rank for each expert of this one, [size, num_experts / size], and the
        numbers of rows that go to, and come from, each rank. `ids`: the expert of each row, [num_rows]."""
        going = torch.zeros(num_experts, dtype=torch.long, device=ids.device)
        going.scatter_add_(0, ids, torch.ones_like(ids))
        coming = torch.empty_like(going)
        distributed.all_to_all_single(coming, going, group=self.group)
        by_rank = torch.stack((going, coming)).view(2, self.size, -1)
        sent, received = by_rank.sum(dim=-1).tolist()
        return by_rank[1], sent, received

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Give each rank its run of `rows`, and return the runs that the ranks have for this one, in rank order."""
        found: Tensor = _Exchange.apply(rows, sent, received, self.group)  # type: ignore[no-untyped-call]
        return found

    def _of_own(self, experts: Any, rows: Tensor, arriving: Tensor) -> Tensor:
        """Return each row as its expert on this rank computes it. `arriving`: see `_counted`."""
        own = arriving.shape[1]
        number, each = len(rows), torch.arange(own, device=rows.device).repeat(self.size)
        ids = each.repeat_interleave(arriving.flatten(), output_size=number)
        if not number:  # a row of zeros gives every weight its gradient of zeros
            rows, ids = torch.cat((rows, rows.new_zeros(1, rows.shape[1]))), ids.new_zeros(1)
        usual = type(experts).forward.__wrapped__
        if self.usual != "eager":
            usual = ALL_EXPERTS_FUNCTIONS[self.usual]
        found: Tensor = usual(self._own(experts, own), rows, ids[:, None], rows.new_ones(len(rows), 1))
        return found[:number]

    def _own(self, experts: Any, number: int) -> Any:
        """Return a view of a module of experts that has this rank's `number` experts alone, in the dtype of products.
        Gradients flow through it."""
        view = copy.copy(experts)
        weights = experts.named_parameters(recurse=False)
        held = {name: whole.to_local().to(self.dtype) for name, whole in weights}
        vars(view).update(held, num_experts=number, _parameters={})
        return view


class _Exchange(torch.autograd.Function):
    """Its gradient takes the same way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: distributed.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: distributed.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(received), *rows.shape[1:])
    distributed.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


def spread(
    module: Module,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    group: distributed.ProcessGroup,
    dtype: torch.dtype,
) -> set[Parameter]:
    """Spread the experts of a module over the ranks of `group`, and return their parameters, which have no memory yet.

    `placements` on `mesh` are those of FSDP. `dtype`: of the experts' products.
    """
    made: set[Parameter] = set()
    for experts in experts_of(module):
        for name, whole in experts._parameters.items():
            if whole is not None:
                local = torch.empty_like(whole[: len(whole) // group.size()], device="meta")
                placed = DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())
                experts._parameters[name] = Parameter(placed, requires_grad=whole.requires_grad)
                made.add(experts._parameters[name])
        setattr(experts, SPREAD, Spread(group.size(), group, dtype, experts.config._experts_implementation or "eager"))
    models: list[Any] = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    for part in models:
        if part._can_set_experts_implementation():
            part.set_experts_implementation(SPREAD)
    return made


@torch.compiler.disable  # type: ignore[untyped-decorator] # exchanges have sizes that only the ranks know
def _compute(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the experts of a layer: an experts function of Transformers."""
    how: Spread = getattr(experts, SPREAD)
    return how.computed(experts, hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register(SPREAD, _compute)
