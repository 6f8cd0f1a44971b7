"""How much memory a learner needs, counted without any: its real passes, on tensors that have shapes and no values.

A model of one layer and one of two layers make a pass of the run's micro-batch. Every tensor that the pass makes is
counted for as long as it lives. The difference of the two peaks is what one more layer needs. So the count knows what
the architecture saves for its backward pass, and what activation checkpointing leaves of that.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from penstock.config import ConfigError, LoraConfig, TrainerConfig
from penstock.config.trainer_settings import LEAST_PASS_TOKENS
from penstock.model.experts import experts_of, per_token
from penstock.model.load_policy import OWN_CODE
from penstock.trainer import output_layer, packed_attention
from penstock.trainer.forward import recompute_activations, shares_prefixes, token_logprobs
from penstock.trainer.lora import attach
from penstock.trainer.packing import TokenTable, micro_batches
from penstock.trainer.ranks import BUCKET_ELEMENTS
from penstock.trainer.strategy import check_shared_passes, check_spread_experts, layers_of

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
EXPERTS = "grouped_mm"
"""Name of the function of Transformers that computes experts without a look at the values of tensors, as on devices."""
UNMASKED = "penstock_unmasked"
"""Name of an attention function in Transformers."""
ALL_SPARSE: dict[str, Any] = {"first_k_dense_replace": 0, "mlp_only_layers": [], "decoder_sparse_step": 1}
"""Settings of architectures with which every layer has experts."""
MASTER_BYTES = 4
"""Of weights, gradients and each of the optimizer's two moments."""
RESERVE_BYTES = 2**30
"""Of every process that computes: libraries, the device's context, and their workspaces."""
FRAGMENTS = 0.05
"""Share of the tensors that is lost between them."""
LARGER_PASSES = (4, 2)
"""How many times larger passes on an accelerator may be, the largest first."""
ROOM_FOR_PASSES = 0.75
"""Share of an accelerator's memory that a process with larger passes may take."""
RECOMPUTED, TOKENS = "activation_checkpointing", "tokens_per_microbatch"
"""Names of settings."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are made, for as long as they live."""

    def __init__(self, *, known: Iterable[Tensor] = ()) -> None:
        """`known`: tensors that exist already."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known = WeakIdKeyDictionary()
        for tensor in known:
            self._known[tensor.untyped_storage()] = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known[storage] = None
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.live -= size


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a model, in parameters."""

    num_layers: int
    all: int
    layer: int
    """The largest layer."""
    experts: int
    """Experts of all layers."""
    layer_experts: int
    """The experts of a layer, at most."""
    layer_rest: int
    """A layer without its experts, at most."""
    outside: int
    """Parameters of no layer: embeddings, output layer, last norm."""
    trained: int
    """All, or those of the adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBytes:
    """Memory of one process of the trainer, in bytes."""

    states: int
    """Weights, gradients and moments of the policy, and rounded weights for passes, if the actor is there."""
    copies: int
    """Other copies of the policy, critic and reference."""
    gathered: int
    """Layers of shards that are gathered for a pass, and their gradients. Of experts that stay on their ranks, copies
    in the dtype of the computation, and the rows of an exchange."""
    one_pass: int
    """The largest micro-batch: activations and the output layer."""
    optimizer_step: int
    """What a step makes beside the states, after the passes: sums over ranks, and the optimizer's own tensors."""
    saved: int
    """A copy in main memory of what a checkpoint saves."""
    is_in_main_memory: bool
    """Whether the process computes there too."""

    @property
    def total(self) -> int:
        """Return what the device of the process must hold."""
        held = self.states + self.copies + max(self.gathered + self.one_pass, self.optimizer_step)
        return held + self.saved if self.is_in_main_memory else held


def sizes(architecture: Any, trainer: TrainerConfig) -> Sizes:
    """Return the sizes of a model with this Transformers configuration. Raises `ConfigError` for adapters that it
    cannot have."""
    model = _hollow(architecture)
    layers = layers_of(model)
    num_all = sum(p.numel() for p in model.parameters())
    in_layers = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    experts = [sum(p.numel() for e in experts_of(layer) for p in e.parameters(recurse=False)) for layer in layers]
    if trainer.lora is not None:
        attach(model, trainer.lora)
    return Sizes(
        num_layers=len(layers),
        all=num_all,
        layer=max(in_layers, default=0),
        experts=sum(experts),
        layer_experts=max(experts, default=0),
        layer_rest=max((each - part for each, part in zip(in_layers, experts, strict=True)), default=0),
        outside=num_all - sum(in_layers),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The largest micro-batch, and how the model computes it."""

    tokens: int
    longest: int
    """Tokens of a sample."""
    dtype: torch.dtype
    """Of the computation."""
    lora: str = ""
    """Settings of the adapters, as JSON."""
    sharded: bool = False
    packs: bool = False
    """Whether samples are packed, if the model can do that."""
    recomputed: bool = False
    """Whether activations are computed again in the backward pass."""
    offloaded: bool = False
    """Whether what is kept for that waits in main memory."""


def pass_bytes(architecture: Any, shape: Pass) -> int:
    """Return the peak of a forward and a backward pass, without weights and gradients."""
    asked = architecture.to_json_string(use_diff=False), shape
    if asked not in _COUNTED:
        num_layers = int(architecture.get_text_config().num_hidden_layers)
        one, two = (_peak(_shortened(architecture, num), shape) for num in (1, min(2, num_layers)))
        kept = 0 if shape.offloaded else max(two - one, 0)
        _COUNTED[asked] = one + (num_layers - 1) * kept
    return _COUNTED[asked]


_COUNTED: dict[tuple[str, Pass], int] = {}
"""Results of `pass_bytes`, which are the same for any number of ranks."""


class _Process:
    """Counts the bytes of a process that need no trial: all but those of a pass."""

    def __init__(
        self, size: Sizes, trainer: TrainerConfig, dtype: torch.dtype, roles: list[str], *, on_accelerator: bool
    ) -> None:
        self.size, self.trainer, self.dtype = size, trainer, dtype
        self.acts, self.judges, self.refers = ("actor" in roles, "critic" in roles, "reference" in roles)
        self.on_accelerator = on_accelerator
        distributed, ranks = trainer.distributed, trainer.ranks
        self.sharded = distributed.shards(ranks=ranks, num_parameters=size.all)
        self.parts = distributed.num_shards(ranks=ranks, num_parameters=size.all)
        self.offload = trainer.offload if on_accelerator else []
        self.waiting = 2 * MASTER_BYTES if "optimizer" in self.offload else 0
        """In main memory, of each trained weight."""
        self.rounded = 0 if self.sharded or dtype == torch.float32 else dtype.itemsize
        """Of each weight of a replica."""
        self.base = 0 if trainer.lora is None else dtype.itemsize * size.all // self.parts
        """Weights below adapters, which have the dtype of the passes."""
        self.whole, self.trained = (MASTER_BYTES * each // self.parts for each in (size.all, size.trained))
        self.frozen = (self.rounded or MASTER_BYTES) * size.all // self.parts
        self.snapshot = 0
        if trainer.objective.proximal == "snapshot":
            self.snapshot = self.frozen if trainer.lora is None else self.trained

    def states(self) -> int:
        if not self.acts:
            return 0
        return (4 * MASTER_BYTES + self.rounded - self.waiting) * self.size.trained // self.parts + self.base

    def copies(self) -> int:
        found = self.frozen * self.refers
        if self.judges:
            found += 4 * self.whole + (self.rounded - self.waiting // self.parts) * self.size.all
        if self.acts:
            has_parity = self.trainer.canaries.parity_every is not None
            found += self.snapshot + self.trained * (has_parity and not self.on_accelerator)
        return found

    def gathered(self) -> int:
        """Return the bytes of what is gathered of shards: two layers and the root, and the gradients of one unit, which
        are reduced in float32. Experts that stay on their ranks are not gathered. Their copies in the dtype of the
        passes live until the backward pass, unless they are made again there."""
        if not self.sharded:
            return 0
        size, computed, own = self.size, self.dtype.itemsize, 0
        stay = self.trainer.distributed.expert_parallel
        layer = size.layer_rest if stay else size.layer
        if stay and (self.trainer.lora is None or self.judges):  # frozen ones have that dtype, and no gradients
            held = size.layer_experts if self.trainer.activation_checkpointing else size.experts
            own = (computed + MASTER_BYTES) * size.layer_experts + (computed * held if computed < MASTER_BYTES else 0)
        unit = max(layer, size.outside)
        return computed * (2 * layer + size.outside) + (computed + MASTER_BYTES) * unit + own // self.parts

    def optimizer_step(self) -> int:
        trained = self.trained if self.acts else self.whole
        found = 0
        if self.waiting:  # the moments of some weights are on the device
            largest = MASTER_BYTES * max(BUCKET_ELEMENTS, self.size.outside // self.parts)
            found = self.waiting // MASTER_BYTES * min(trained, largest)
        elif not self.on_accelerator:  # square roots of the second moments, which a fused optimizer does not make
            found = trained
        if self.trainer.ranks > 1 and not self.sharded:
            found = max(found, min(trained, MASTER_BYTES * BUCKET_ELEMENTS))
        return found

    def saved(self) -> int:
        found = self.frozen * self.refers + 3 * self.whole * self.judges
        if self.acts:  # the policy, the snapshot and both moments; with adapters the merged policy and what they change
            found += 2 * self.trained + self.snapshot + (self.whole if self.trainer.lora is None else 2 * self.base)
        return found


def learner_bytes(
    architecture: Any,
    trainer: TrainerConfig,
    *,
    longest: int,
    dtype: torch.dtype,
    on_accelerator: bool,
    roles: list[str],
) -> LearnerBytes:
    """Return what one process of the trainer needs. `longest`: tokens of the longest sample. `dtype`: of the
    computation. `roles`: the roles in the process. Raises `ConfigError` for settings that the model cannot have."""
    counted = _Process(sizes(architecture, trainer), trainer, dtype, roles, on_accelerator=on_accelerator)
    context = trainer.distributed.context_ranks
    if context > 1:
        check_shared_passes(_hollow(architecture), trainer.distributed)
    if trainer.distributed.expert_parallel:
        check_spread_experts(_hollow(architecture), trainer.distributed, trainer.ranks)
    tokens = -(-max(trainer.pass_tokens, longest) // context)
    gathered = counted.gathered()
    if counted.sharded and trainer.distributed.expert_parallel:
        gathered += _exchanged(architecture, tokens, dtype.itemsize)
    shape = Pass(
        tokens=tokens,
        longest=min(longest, tokens),
        dtype=dtype,
        sharded=counted.sharded,
        packs=counted.sharded or on_accelerator or context > 1,
        recomputed=bool(trainer.activation_checkpointing),
        offloaded="activations" in counted.offload,
    )
    shapes = [shape] if trainer.lora is None or counted.judges else []
    if counted.acts and trainer.lora is not None:
        shapes.append(replace(shape, lora=trainer.lora.model_dump_json()))
    return LearnerBytes(
        states=counted.states(),
        copies=counted.copies(),
        gathered=gathered,
        one_pass=max(pass_bytes(architecture, shape) for shape in shapes),
        optimizer_step=counted.optimizer_step(),
        saved=counted.saved(),
        is_in_main_memory=not on_accelerator,
    )


def with_reserve(num_bytes: int) -> int:
    """Return what a process with tensors of so many bytes takes on its device."""
    return int(num_bytes * (1 + FRAGMENTS)) + RESERVE_BYTES


def decided(
    architecture: Any,
    trainer: TrainerConfig,
    *,
    longest: int,
    dtype: torch.dtype,
    roles: list[str],
    capacity: int | None,
) -> TrainerConfig:
    """Return the settings of a process with activation checkpointing and the tokens of a pass decided.

    If they are unset, activations are computed again if the process would else take more than the `capacity` of its
    accelerator in bytes, and passes are as large as `ROOM_FOR_PASSES` allows. `capacity`: None on a CPU. For the other
    arguments see `learner_bytes`.
    """
    wanted, tokens = trainer.activation_checkpointing, trainer.pass_tokens

    def need(**update: Any) -> int:
        settings = trainer.model_copy(update=update)
        given: dict[str, Any] = {"longest": longest, "dtype": dtype, "roles": roles}
        return with_reserve(learner_bytes(architecture, settings, on_accelerator=True, **given).total)

    try:
        if wanted is None and capacity is not None:
            wanted = need() > capacity
        if trainer.tokens_per_microbatch is None and capacity is not None:
            larger = (LEAST_PASS_TOKENS * times for times in LARGER_PASSES)
            fits = (each for each in larger if need(**{RECOMPUTED: wanted, TOKENS: each}) <= ROOM_FOR_PASSES * capacity)
            tokens = next(fits, tokens)
    except ConfigError:
        raise
    except Exception as error:  # whatever a model does with tensors that have no values
        logger.warning(
            "the memory of a %s model cannot be counted (%s), so activations are kept: if they do not fit, set "
            "trainer.activation_checkpointing",
            *(architecture.model_type, error),
        )
    return trainer.model_copy(update={RECOMPUTED: bool(wanted), TOKENS: tokens})


def _exchanged(architecture: Any, tokens: int, computed: int) -> int:
    """Return the bytes of the rows that a rank sends to experts and gets from other ranks at one moment, if tokens go
    to all experts alike."""
    model = _hollow(architecture)
    return 2 * tokens * per_token(model) * int(model.config.get_text_config().hidden_size) * computed


def architecture_of(model_dir: Path) -> Any:
    """Return the Transformers configuration of a model directory."""
    return AutoConfig.from_pretrained(model_dir, **OWN_CODE)


def _peak(architecture: Any, shape: Pass) -> int:
    hollow, factor, dtype = _hollow(architecture), 1, shape.dtype
    experts = hollow._can_set_experts_implementation()
    if experts:  # they are counted in bfloat16, the only dtype that their kernel's shapes are known for
        factor, dtype = dtype.itemsize // torch.bfloat16.itemsize, torch.bfloat16
    packs = shape.packs and packed_attention.pack(hollow)
    output_layer.OutputLayer.of(hollow)
    table = _table(shape, vocab=int(architecture.get_text_config().vocab_size))
    share = not shape.sharded and not shape.recomputed and shares_prefixes(hollow)
    model = _hollow(architecture, dtype)
    if shape.lora:
        attach(model, LoraConfig.model_validate_json(shape.lora), dtype)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        _give_memory(model)
        if experts:
            model.set_experts_implementation(EXPERTS)
        output_layer.same_as(model, hollow)
        if packs or hollow._supports_attention_backend:
            packed_attention.use(model, packed_attention.PACKED if packs else UNMASKED)
        if shape.recomputed:
            recompute_activations(model)
        known = [*model.parameters(), *model.buffers()]
        for parameter in (each for each in model.parameters() if each.requires_grad):
            if shape.sharded or shape.dtype != torch.float32:  # gradients leave for shards, or for float32 weights
                parameter.register_post_accumulate_grad_hook(_drop_gradient)
            else:
                parameter.grad = torch.zeros_like(parameter)
                known.append(parameter.grad)
        live = stack.enter_context(LiveBytes(known=known))
        for micro in micro_batches(table, shape.tokens, CPU, share_prefixes=share, pack=packs):
            logprobs, entropy = token_logprobs(model, micro)
            (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
            del logprobs, entropy
    return int(live.peak) * factor


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, **given: Any) -> Any:
    """Attend as padded rows do, which need no mask. Transformers would make one for tensors without values."""
    return sdpa_attention_forward(module, query, key, value, None, **given)


AttentionInterface.register(UNMASKED, _attend)
AttentionMaskInterface.register(UNMASKED, lambda *_, **__: None)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _table(shape: Pass, vocab: int) -> TokenTable:
    """Return a micro-batch of samples with different prompts: as many of the longest ones as fit, at least one."""
    lengths = [shape.longest] * max(shape.tokens // shape.longest, 1)
    ids = [np.full(length, number % vocab, dtype=np.int64) for number, length in enumerate(lengths)]
    return TokenTable.build(ids, np.ones(sum(lengths), dtype=np.bool_))


def _hollow(architecture: Any, dtype: torch.dtype = torch.float32) -> Any:
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(deepcopy(architecture), dtype=dtype, trust_remote_code=False)
    return made.eval()


def _give_memory(model: Module) -> None:
    """Replace all tensors of a model without weights by new ones on the CPU."""
    made: dict[int, Parameter] = {}  # tied parameters stay tied
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                new = Parameter(torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad)
                part._parameters[name] = made.setdefault(id(parameter), new)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device="cpu")


def _shortened(architecture: Any, num_layers: int) -> Any:
    """Return the configuration with this number of layers: the last ones, where they differ."""
    found = deepcopy(architecture)
    text = found.get_text_config()
    if kinds := vars(text).get("layer_types"):
        text.layer_types = kinds[-num_layers:]
    for name, sparse in ALL_SPARSE.items():
        if vars(text).get(name):
            setattr(text, name, sparse)
    text.num_hidden_layers = num_layers
    return found
