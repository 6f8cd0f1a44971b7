"""Distribution of a model over the ranks: a replica on each rank, or a shard on each rank (FSDP2).

Replicas accumulate gradients locally, and sum them over ranks once per step. With shards, every forward or backward
pass of one rank is a pass of all ranks: layers are gathered when needed, and gradients are reduced to shards. Ranks
with fewer micro-batches therefore run passes over empty ones. Shards also exclude prefix sharing: gradients through
cached keys and values bypass the layers' outputs, and FSDP attaches its gathering to those outputs.

Trained weights are float32. In a run that computes in bfloat16, layers of shards are gathered in bfloat16, and their
gradients are reduced in float32; passes of replicas use rounded copies of the weights (`rounded.py`).

With `shard_ranks`, groups of ranks hold equal shards. Layers are gathered within a group, and gradients are summed over
the groups as well (HSDP).

With `expert_parallel`, experts are not gathered either: each rank computes those of its shard, for the tokens of all
ranks of its group (`expert_parallel.py`).

Ranks may also share every pass (`context_parallel.py`). In all cases gradients are plain sums over the ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as Sharding
from torch.nn import Module, Parameter
from transformers import PreTrainedModel

from penstock.config import ConfigError, DistributedConfig, TrainerConfig
from penstock.model.experts import experts_of, num_experts
from penstock.model.load_policy import without_weights
from penstock.trainer.context_parallel import Context, context_of
from penstock.trainer.expert_parallel import spread
from penstock.trainer.packed_attention import pack
from penstock.trainer.packing import MicroBatch, idle
from penstock.trainer.ranks import Ranks
from penstock.trainer.rounded import Rounded, round_frozen
from penstock.trainer.shards import SHARDS, assign

BROADCAST = "begin with the same weights"
"""Name of the operation in error messages about ranks that wait for each other."""
REPLICAS = "replicas"
"""Dimension of the mesh of ranks along which they hold equal shards."""


class Shard(NamedTuple):
    """What a rank holds of a model."""

    number: int
    num_shards: int
    """Of a whole model."""
    is_saved: bool
    """Whether this rank writes it: others may hold the same."""


class Strategy:
    """The strategy in which every rank holds a full replica, and the interface of all strategies."""

    is_sharded = False
    """Whether every rank saves its own part, and every pass of one rank is a pass of all ranks."""

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        compute_dtype: torch.dtype = torch.float32,
        *,
        packs: bool = False,
        context: Context | None = None,
    ) -> None:
        """`device`: the device on which this rank computes. `compute_dtype`: of its passes. `packs`: whether passes
        have packed samples, without padding. `context`: the ranks with which this one shares its passes, if it
        does."""
        self.ranks, self.device, self.packs, self.context = ranks, device, packs, context
        self._compute_dtype = compute_dtype
        self._rounded: Rounded | None = None
        self.shard = Shard(number=0, num_shards=1, is_saved=ranks.is_first)

    @property
    def is_counted(self) -> bool:
        """Return whether what this rank computes is counted: of the ranks that share passes, one is."""
        return self.context is None or self.context.is_first

    def place(self, module: Module, *, precise: Sequence[Module] = ()) -> None:
        """Distribute `module` over the ranks, in place, with rank 0's weights.

        Frozen parameters of replicas are equal on all ranks from the start. `precise`: parts of the module that compute
        in float32 in any run.
        """
        trained = [parameter.detach() for parameter in module.parameters() if parameter.requires_grad]
        self.ranks.broadcast(trained, BROADCAST)
        if self._compute_dtype != torch.float32:
            self._rounded = Rounded(module, self._compute_dtype, precise=precise)

    def computing(self) -> AbstractContextManager[None]:
        """Return the context of passes of the placed module: of a forward pass with its backward pass."""
        return nullcontext() if self._rounded is None else self._rounded.in_use()

    def changed(self) -> None:
        """Note that the trained weights of the placed module have changed. Whoever changes them must call this."""
        if self._rounded is not None:
            self._rounded.changed()

    def released(self) -> None:
        """Free what only passes need."""
        if self._rounded is not None:
            self._rounded.forget()

    def copied(self, policy: PreTrainedModel) -> PreTrainedModel:
        """Return a placed and frozen copy of the present policy, which has no adapters."""
        made = copy.deepcopy(policy).requires_grad_(False).eval()
        round_frozen(made, self._compute_dtype)
        return made

    def summed(self, parameters: Sequence[Parameter], *, in_place: bool) -> list[Tensor]:
        """Return the gradients summed over ranks. Unless `in_place`, accumulated gradients stay unchanged."""
        if self.ranks.size > 1:
            self._add_missing_gradients(parameters)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.ranks.size > 1 and not in_place:
            gradients = [gradient.clone() for gradient in gradients]
        self.ranks.sum(gradients, "sum gradients")
        return gradients

    def passes(self, micros: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches, then idle ones while other ranks still have passes that need this rank."""
        yield from micros

    def _add_missing_gradients(self, parameters: Sequence[Parameter]) -> None:
        """Set a zero gradient for each parameter that has a gradient only on other ranks."""
        has = self.ranks.largest([float(p.grad is not None) for p in parameters], "compare gradients")
        for parameter, anywhere in zip(parameters, has, strict=True):
            if anywhere and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


class Sharded(Strategy):
    """The strategy in which every rank holds a shard of each layer, of its gradient and of its optimizer state."""

    is_sharded = True

    def __init__(
        self,
        ranks: Ranks,
        policy: PreTrainedModel,
        compute_dtype: torch.dtype,
        *,
        num_shards: int,
        packs: bool,
        context: Context | None,
        spreads_experts: bool = False,
    ) -> None:
        """`ranks` have met, and each `num_shards` of them share a copy. `policy` has no adapters. `spreads_experts`:
        whether experts stay on the ranks of their shards. Raises `ConfigError` if torch is too old to sum gradients of
        shards without averaging."""
        assert ranks.device is not None
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise ConfigError(
                f"trainer.distributed.strategy fsdp: torch {torch.__version__} can only average the gradients of "
                "shards: install a newer torch, or choose ddp"
            )
        super().__init__(ranks, ranks.device, compute_dtype, packs=packs, context=context)
        mesh = {SHARDS: num_shards}
        self._placements: tuple[Placement, ...] = (Sharding(0),)
        if num_shards < ranks.size:
            mesh = {REPLICAS: ranks.size // num_shards, **mesh}
            self._placements = (Replicate(), *self._placements)
        self._mesh = init_device_mesh(self.device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        replica, number = divmod(ranks.index, num_shards)
        self.shard = Shard(number=number, num_shards=num_shards, is_saved=replica == 0)
        self._hollow = without_weights(policy)
        self._compute_dtype, self._spreads_experts = compute_dtype, spreads_experts
        self._experts: set[Parameter] = set()
        """Parameters of experts that are spread over the ranks."""
        self._precision = MixedPrecisionPolicy()
        if compute_dtype != torch.float32:
            self._precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)

    def place(self, module: Module, *, precise: Sequence[Module] = ()) -> None:
        weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
        self._load_sharded(module, weights, precise)

    def copied(self, policy: PreTrainedModel) -> PreTrainedModel:
        made = copy.deepcopy(self._hollow)
        self._load_sharded(made, {name: parameter.detach() for name, parameter in policy.named_parameters()})
        return made.requires_grad_(False).eval()

    def summed(self, parameters: Sequence[Parameter], *, in_place: bool) -> list[Tensor]:
        found = []
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                if parameter in self._experts and self.shard.num_shards < self.ranks.size:
                    gradient = self._over_replicas(gradient if in_place else gradient.clone())
                found.append(gradient)
        return found

    def passes(self, micros: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        own = list(micros)
        (most,) = self.ranks.largest([len(own)], "agree on the number of micro-batches")
        yield from own
        for _ in range(int(most) - len(own)):
            yield idle(self.device)

    def _load_sharded(self, module: Module, weights: Mapping[str, Tensor], precise: Sequence[Module] = ()) -> None:
        """Shard `module`, and load `weights` and rank 0's buffers into it.

        Each of `weights` is sharded already, or rank 0's value counts and the other ranks' values do not. No device
        needs memory for more than its shard and one layer, unless the whole module was on the device before.
        """
        buffers = dict(module.named_buffers())
        self._shard(module, precise)
        module.to_empty(device=self.device)
        for name, buffer in module.named_buffers():
            buffer.copy_(self._on_all_ranks(buffers[name]))
        for name, parameter in module.named_parameters():
            assign(parameter, self._on_all_ranks(weights[name]))

    def _on_all_ranks(self, tensor: Tensor) -> Tensor:
        """Return a sharded tensor as it is, or else rank 0's whole tensor on every rank."""
        if isinstance(tensor, DTensor):
            return tensor
        given = tensor.to(self.device) if self.ranks.is_first else torch.empty_like(tensor, device=self.device)
        self.ranks.broadcast([given], BROADCAST)
        return given

    def _shard(self, module: Module, precise: Sequence[Module]) -> None:
        """Shard each layer separately, and the root.

        The root too is resharded after its forward pass: while gathered, it would miss changes of its weights.
        """
        ignored = self._spread(module) if self._spreads_experts else None
        for part in precise:
            fully_shard(part, mesh=self._mesh, reshard_after_forward=True)
        for layer in (*layers_of(module), module):
            fully_shard(
                layer, mesh=self._mesh, reshard_after_forward=True, mp_policy=self._precision, ignored_params=ignored
            )
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
                part.set_gradient_divide_factor(1.0)

    def _spread(self, module: Module) -> set[Parameter]:
        """Spread the experts of a module over the ranks that share a copy of it, and return their parameters."""
        group = self.ranks.group(self.shard.num_shards)
        made = spread(module, self._mesh, self._placements, group, self._compute_dtype)
        self._experts |= made
        return made

    def _over_replicas(self, gradient: Tensor) -> Tensor:
        """Sum the gradient of experts over the groups of ranks, in place. Within a group it is the sum already."""
        assert isinstance(gradient, DTensor)
        shards = self.shard.num_shards
        group = self.ranks.group(self.ranks.size // shards, stride=shards)
        distributed.all_reduce(gradient.to_local(), group=group)
        return gradient


def is_sharded(policy: PreTrainedModel, config: TrainerConfig, ranks: Ranks) -> bool:
    """Return whether `policy`, which may be without weights, is sharded over the ranks."""
    return config.distributed.shards(ranks=ranks.size, num_parameters=num_parameters(policy))


def num_parameters(policy: PreTrainedModel) -> int:
    """Return the number of parameters of a model, which may be without weights."""
    return sum(parameter.numel() for parameter in policy.parameters())


def strategy_of(policy: PreTrainedModel, config: TrainerConfig, ranks: Ranks, compute_dtype: torch.dtype) -> Strategy:
    """Return the configured strategy for a policy that is not sharded yet.

    For sharding, rank 0 has the policy on any device, and the other ranks have it without weights (`meta`). Samples are
    packed on accelerators and by shards, if the policy can do that. Replicas on CPUs share prompts, which pays more.
    Raises `ConfigError` if ranks cannot share passes as configured.
    """
    sharded = is_sharded(policy, config, ranks)
    shared = min(config.distributed.context_ranks, ranks.size)
    packs = (sharded or policy.device.type != "cpu" or shared > 1) and pack(policy)
    if shared > 1:
        check_shared_passes(policy, config.distributed)
    check_spread_experts(policy, config.distributed, ranks.size)
    context = context_of(ranks, shared)
    if sharded:
        return Sharded(
            ranks,
            policy,
            compute_dtype,
            num_shards=config.distributed.num_shards(ranks=ranks.size, num_parameters=num_parameters(policy)),
            packs=packs,
            context=context,
            spreads_experts=config.distributed.expert_parallel,
        )
    return Strategy(ranks, policy.device, compute_dtype, packs=packs, context=context)


def check_shared_passes(policy: PreTrainedModel, config: DistributedConfig) -> None:
    """Raise `ConfigError` if `context_ranks` ranks cannot share the passes of a model, which may be without weights."""
    model = policy.config.get_text_config()
    if not pack(policy):
        raise ConfigError(
            f"trainer.distributed.context_ranks ({config.context_ranks}): ranks can only share the passes of models "
            f"with plain causal attention in every layer, and a {model.model_type} model has other layers: set it to 1"
        )
    heads = model.num_attention_heads
    if fault := config.fault_of_heads(heads, getattr(model, "num_key_value_heads", None) or heads):
        raise ConfigError(fault)


def check_spread_experts(policy: PreTrainedModel, config: DistributedConfig, ranks: int) -> None:
    """Raise `ConfigError` if so many ranks cannot share the experts of a model, which may be without weights, although
    `expert_parallel` asks for it. A single rank shares nothing."""
    held = experts_of(policy)
    counts = {part.num_experts for part in held} or {num_experts(policy)}
    for count in sorted(counts):
        if fault := config.fault_of_experts(count, ranks=ranks, num_parameters=num_parameters(policy)):
            raise ConfigError(fault)
    weights = [(part.num_experts, each) for part in held for each in part.parameters(recurse=False)]
    if config.expert_parallel and ranks > 1 and not (weights and all(len(each) == count for count, each in weights)):
        raise ConfigError(
            f"trainer.distributed.expert_parallel: ranks can only share experts that Transformers computes through its "
            f"ExpertsInterface, and those of a {policy.config.get_text_config().model_type} model are none: set it to "
            "false"
        )


def compile_layers(model: Module) -> None:
    """Compile the parts of each layer, when they are first used, for any number of tokens. Activation checkpointing
    wraps whole layers, so it stays outside of what is compiled."""
    for layer in layers_of(model):
        for part in layer.children():
            part.compile(dynamic=True)


def layers_of(module: Module) -> list[Module]:
    """Return the blocks that Transformers does not split (`_no_split_modules`)."""
    names = {name for part in module.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return [part for part in module.modules() if type(part).__name__ in names]
