"""Settings of the learner: its steps, its objective, its critic and adapters, and its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from penstock.config.section import Section

Clipped = Literal["ppo", "decoupled", "geometric_mask", "gspo", "icepop"]
"""Objectives that clip the ratio of every token or sample."""
Weighted = Literal["tis", "sequence_tis", "sequence_mis"]
"""Objectives that weight by a capped ratio."""
ObjectiveName = Literal[Clipped, Weighted, "pois", "reinforce", "cispo", "topr", "m2po"]

UNCORRECTED: tuple[ObjectiveName, ...] = ("reinforce", "pois")
"""Objectives without importance weights: they do not use the probabilities of the sampling policy."""

OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "cispo": {"clip_low": 1.0},
    "decoupled": {"proximal": "interpolated"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "normalize": "sequence"},
    "geometric_mask": {"mask_low": 0.99, "mask_high": 1.01},
}
"""Defaults of single objectives, where an objective's source paper differs from the common defaults."""


READ_BY: dict[str, tuple[ObjectiveName, ...]] = {
    "clip_low": (*get_args(Clipped), "cispo"),
    "clip_high": (*get_args(Clipped), "cispo"),
    "dual_clip": get_args(Clipped),
    "weight_cap": (*get_args(Weighted), "decoupled"),
    "beyond_cap": ("decoupled",),
    "mask_low": ("icepop", "geometric_mask"),
    "mask_high": ("icepop", "geometric_mask"),
    "second_moment": ("m2po",),
    "second_moment_over": ("m2po",),
    "proximal": ("decoupled", "icepop"),
}
"""Settings that only some objectives read, with those objectives."""


class MasteredConfig(Section):
    """Mask for tokens that the policy has mastered: tokens it is sure of, in samples better than their group, while the
    sample's mean entropy is low (UloRL's DMMPT, arXiv 2507.19766, section 3.3). The mask keeps entropy from
    collapsing."""

    probability: float = Field(0.99, gt=0, lt=1)
    """Mask tokens with at least this probability."""
    entropy: float = Field(0.2, gt=0)
    """Mask tokens only in samples with a mean entropy below this value, in nats per token."""


class CanaryConfig(Section):
    """Thresholds at which the learner raises an alarm."""

    max_parity_gap: float = Field(0.05, gt=0)
    """Largest allowed gap in nats per token: mean |log-probability by the trainer - by the engine| over tokens for
    which both used the same policy version."""
    parity_every: int | None = Field(20, ge=1)
    """Steps without a comparable token (all trained tokens come from older versions) before the learner keeps a copy of
    the trained weights, in main memory. It keeps the copy until samples from that version arrive. None saves the memory
    of the copy; the learner then compares only when comparable tokens arrive."""
    min_ess: float = Field(0.2, ge=0, le=1)
    """Lowest normal effective sample size of the importance weights: (sum w)^2 / (N sum w^2) over a step's tokens. The
    learner raises an alarm when half of the latest 20 steps are below it."""


class AdvantagesConfig(Section):
    """How rewards become the advantages of tokens, without a critic. Formulas are in `trainer/advantages.py`."""

    name: Literal["episode", "turn", "gigpo"] = "episode"
    """`episode`: all tokens of an episode have its reward minus the mean reward of its group (GRPO). `turn`: the tokens
    of a turn have its discounted return minus the group's mean return at the same turn. `gigpo`: the advantage of the
    episode, plus that of the turn among the group's turns in the same state (GiGPO, arXiv 2505.10978). Turns are in the
    same state if their observations are equal, or what the environment returns in `info["state"]`."""
    normalize: bool = True
    """Divide advantages by the standard deviation of the rewards or returns that are compared (GRPO)."""
    deviation: Literal["population", "sample"] = "population"
    """Divisor of the variance: the number n of what is compared, or n - 1 (`sample`: verl, TRL, slime, OpenRLHF). In a
    group of eight, advantages with `sample` are 6 % smaller."""
    discount: float = Field(0.95, gt=0, le=1)
    """`turn`, `gigpo`: factor on the reward of each later turn in the return of a turn."""
    turn_weight: float = Field(1.0, ge=0)
    """`gigpo`: factor on the advantage of the turn."""

    @property
    def are_of_turns(self) -> bool:
        """Return whether the turns of an episode have different advantages."""
        return self.name != "episode"

    def contradictions(self) -> Iterator[str]:
        unread = {"episode": ("discount", "turn_weight"), "turn": ("turn_weight",), "gigpo": ()}[self.name]
        for setting in unread:
            if getattr(self, setting) != type(self).model_fields[setting].default:
                yield f"{self.name} does not read {setting}"
        if self.deviation == "sample" and not self.normalize:
            yield "deviation is not read without normalize"


SHARDED_FROM = 10**9
"""Parameters of a policy from which on ranks hold shards of it."""


class CriticConfig(Section):
    """A value function as the baseline, instead of the group's mean (PPO with generalized advantages)."""

    learning_rate: float = Field(1e-3, gt=0)
    discount: float = Field(1.0, gt=0, le=1)
    trace: float = Field(0.95, ge=0, le=1)
    """Lambda of generalized advantage estimation: 0 uses only the next token's value, 1 only the reward."""
    clip: float = Field(0.2, gt=0)
    """Clip of the change of a value per step, in units of reward."""
    whiten: bool = False
    """Shift and scale the advantages of samples that arrive together to mean 0 and deviation 1. verl and TRL do so over
    a whole step."""


class LoraConfig(Section):
    """Low-rank adapters. Only the adapters are trained, in float32; the other weights have the dtype of the passes
    (`model.dtype`). Only the adapters travel to our own servers, and to engines that the run starts with the weights at
    `model.path`. Other servers get whole weights with the adapters added. The reference policy of `objective.kl_coef`
    is the policy without its adapters."""

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    """Adapters are scaled by alpha / rank."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers that get adapters, by the ends of their names. Experts that a layer holds as one tensor, as in
    Transformers, get none."""


class DistributedConfig(Section):
    """Distribution of the learner's work over its ranks."""

    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """`ddp`: each rank has all weights; gradients are summed once per step. `fsdp`: each rank has a shard of weights,
    gradients and optimizer, and layers are gathered when they are needed. `fsdp` needs less memory and more
    communication, and does not share prompts between samples. `auto`: `fsdp` from a billion parameters on, where a
    replica takes 16 GB before it computes anything; else `ddp`."""
    shard_ranks: int | None = Field(None, ge=2)
    """`fsdp`: number of ranks that share one copy of the model, for example those of a node. Several such groups hold
    equal shards, and only gradients travel between them (HSDP). If unset, all ranks share one copy."""
    context_ranks: int = Field(1, ge=1)
    """Number of neighbouring ranks that share every pass (context parallelism, Ulysses): each computes a run of its
    tokens, and some heads of attention. `tokens_per_microbatch` is then the size of what they compute together. It is
    for answers that are too long for one device, for models with plain causal attention."""
    expert_parallel: bool = False
    """`fsdp`: spread the experts of every layer over the ranks that share one copy of the model, instead of gathering
    them. Each rank holds equally many experts, and tokens travel to them and back. It is for models with many experts
    (mixture of experts): their layers are large, and a token needs few of the experts."""
    backend: Literal["gloo", "nccl", "hccl"] | None = None
    """Communication backend between ranks; if unset, the backend that suits the device. `hccl` needs the package
    torch_npu."""

    def shards(self, *, ranks: int, num_parameters: int) -> bool:
        """Return whether each of the actor's `ranks` holds a shard of a policy of this size."""
        wanted = self.strategy == "fsdp" or (self.strategy == "auto" and num_parameters >= SHARDED_FROM)
        return wanted and ranks > 1

    def num_shards(self, *, ranks: int, num_parameters: int) -> int:
        """Return the number of ranks that share one copy of a policy of this size."""
        shards = self.shards(ranks=ranks, num_parameters=num_parameters)
        return min(self.shard_ranks or ranks, ranks) if shards else 1

    def fault_of_heads(self, heads: int, key_heads: int) -> str | None:
        """Return why ranks cannot share the passes of a model with these numbers of attention heads, or None."""
        size = self.context_ranks
        if heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0):
            return None
        return (
            f"trainer.distributed.context_ranks ({size}): {size} ranks cannot share the {heads} attention heads of the "
            f"model and its {key_heads} heads of keys and values: choose a divisor of {heads} that also divides "
            f"{key_heads} or is a multiple of {key_heads}"
        )

    def fault_of_experts(self, num_experts: int, *, ranks: int, num_parameters: int) -> str | None:
        """Return why `ranks` ranks cannot share the experts of a model of this size, or None. `num_experts`: of a
        layer; 0 if the model has none."""
        if not self.expert_parallel or ranks == 1:
            return None
        name = "trainer.distributed.expert_parallel"
        if not num_experts:
            return f"{name}: the model has no experts that ranks could share: set it to false"
        shards = self.num_shards(ranks=ranks, num_parameters=num_parameters)
        if shards == 1:
            return (
                f"{name}: strategy {self.strategy} gives each of {ranks} ranks a replica of a model with "
                f"{num_parameters:,} parameters, and so all {num_experts} experts: set strategy to fsdp"
            )
        if num_experts % shards:
            return (
                f"{name}: {shards} ranks share one copy of the model and cannot hold equal parts of the {num_experts} "
                f"experts of a layer: choose a divisor of {num_experts}, as trainer.ranks or as shard_ranks"
            )
        return None

    def contradictions(self) -> Iterator[str]:
        if self.shard_ranks is not None and self.strategy == "ddp":
            yield f"shard_ranks ({self.shard_ranks}) is for strategy fsdp: ddp has no shards"
        if self.expert_parallel and self.strategy == "ddp":
            yield "expert_parallel is for strategy fsdp: with ddp each rank has all experts"


class ObjectiveConfig(Section):
    """The objective that the policy maximises. Formulas are in `trainer/losses/objective.py`."""

    name: ObjectiveName = "ppo"
    clip_low: float = Field(0.2, gt=0, le=1)
    clip_high: float = Field(0.28, gt=0)
    """Clip range of a ratio: [1 - clip_low, 1 + clip_high] (DAPO's clip-higher). `gspo`: 3e-4 and 4e-4. `cispo`: 1, so
    that weights have no lower bound."""
    dual_clip: float | None = Field(None, gt=1)
    """Upper bound of the loss where A < 0: this value times -A."""
    weight_cap: float = Field(2.0, gt=0)
    """Largest importance weight, for `tis`, `sequence_tis`, `sequence_mis` and `decoupled`."""
    beyond_cap: Literal["truncate", "mask"] = "truncate"
    """`decoupled`: what happens to a weight above `weight_cap`. `truncate` sets it to the cap, `mask` drops the token
    (AReaL)."""
    mask_low: float = Field(0.5, ge=0)
    mask_high: float = Field(5.0, gt=0)
    """`icepop`: range of token ratios that are trained. `geometric_mask`: range of sample ratios that are trained, by
    default 0.99 to 1.01."""
    second_moment: float = Field(0.04, gt=0)
    """`m2po`: largest mean of the squared log-ratios over the kept tokens that a clip could affect."""
    second_moment_over: Literal["batch", "sample"] = "batch"
    """`m2po`: what the mean is over. `batch`: all samples that arrive together (M2PO, arXiv 2510.01161, algorithm 1);
    with `scheduler.trigger.use: batch` they are those of a step. The mask costs one extra forward pass. `sample`: each
    sample. A token's loss then does not depend on other samples, and there is no extra pass."""
    proximal: Literal["current", "interpolated", "snapshot"] = "current"
    """`decoupled`, `icepop`: the policy that the clip is centred on. `current`: the policy being trained, as it was at
    the beginning of the step. With one update per batch, `current` never clips and only weights. `interpolated`
    (`decoupled` only): an estimate of the policy one version behind (A-3PO). `snapshot`: a copy that is renewed every
    `proximal_every` steps; its probabilities cost one extra forward pass."""
    proximal_every: int = Field(4, ge=1)
    """Optimizer steps between two renewals of the snapshot."""
    normalize: Literal["token", "sequence", "constant"] = "token"
    """Divisor of the sum over tokens. `token`: all tokens of the step (DAPO). `sequence`: each sample's tokens, then
    the number of samples (GRPO). `constant`: number of samples times the longest answer allowed (Dr. GRPO, arXiv
    2503.20783)."""
    segments: Literal["all", "newest"] = "all"
    """Segments of an answer that are trained. `newest`: if several policy versions generated an answer, only the tokens
    of the newest version are trained; the earlier tokens are context. It learns much less (`benchmarks/mixed_versions`)
    and is there for comparison."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of KL(pi, reference), estimated per token by k3. The reference is the policy at the start of
    training."""
    mastered: MasteredConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, tree: Any) -> Any:
        return OWN_DEFAULTS.get(tree.get("name", "ppo"), {}) | tree if isinstance(tree, dict) else tree

    @property
    def masks_batch(self) -> bool:
        """Return whether the mask of tokens depends on all samples that arrive together."""
        return self.name == "m2po" and self.second_moment_over == "batch"

    def contradictions(self) -> Iterator[str]:
        for setting, readers in READ_BY.items():
            if self.name not in readers and getattr(self, setting) != type(self).model_fields[setting].default:
                yield f"{self.name} does not read {setting}; {', '.join(readers)} do"
        if self.name == "icepop" and self.proximal == "interpolated":
            yield "icepop has no interpolated proximal policy: choose current or snapshot"
        if self.mask_low >= self.mask_high:
            yield f"mask_low ({self.mask_low:g}) must be below mask_high ({self.mask_high:g})"


LEAST_PASS_TOKENS = 8192
"""Tokens of a pass, if nothing else is set or decided."""


class TrainerConfig(Section):
    """The learner."""

    steps: int = Field(100, ge=1)
    """Maximum number of optimizer steps of the whole run."""
    total_samples: int | None = Field(None, ge=1)
    """Stop after the step at which the total of trained samples reaches this number. Use it for runs with steps of
    different sizes."""
    groups_per_step: int = Field(32, ge=1)
    """Groups per optimizer step (B); B * group_size samples."""
    learning_rate: float = Field(3e-4, gt=0)
    warmup_steps: int = Field(10, ge=0)
    """Optimizer steps over which the learning rate rises to its full value. An optimizer without history treats its
    first gradients as typical; at the full rate these would undo part of what the policy already knew."""
    scale_learning_rate: list[Literal["samples", "ess"]] = Field(default_factory=list)
    """Scaling of the learning rate. `samples`: multiply it by the square root of (samples of the step / samples of
    `groups_per_step` whole groups). `ess`: multiply it by the square root of the samples' effective size under their
    importance weights. Data far from the policy then move it less (VCPO, arXiv 2602.17616)."""
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig | None = None
    """Settings of the value function. It learns from the reward of each turn. None: see `advantages`."""
    lora: LoraConfig | None = None
    """Settings of low-rank adapters. None trains all weights."""
    canaries: CanaryConfig = CanaryConfig()
    advantages: AdvantagesConfig = AdvantagesConfig()
    tokens_per_microbatch: int | None = Field(None, ge=1)
    """Maximum number of tokens per forward pass, padding included. If unset, it is 8,192, and on an accelerator twice
    or four times as many if that takes at most three quarters of its memory: kernels of small models are too short to
    keep it busy."""
    activation_checkpointing: bool | None = None
    """Recompute activations in the backward pass: less memory, more time. Prompts are then not shared between samples.
    If unset, an accelerator does so if the memory plan says that it must."""
    offload: list[Literal["activations", "optimizer"]] = Field(default_factory=list)
    """What waits in pinned main memory while the accelerator does not need it. `activations`: what
    `activation_checkpointing` keeps for the backward pass, two bytes per token and unit of width in each layer.
    `optimizer`: the moments, 8 of the 16 bytes per trained weight. Each step brings those of some weights at a time to
    the device and back. The bus needs most of a second for a billion weights."""
    compile: bool = False
    """Compile the layers of the trainer's models, and what lies between the products of a large output layer, for any
    number of tokens. A layer then has a third of the kernels, which pays on accelerators where kernels are short.
    The first passes take a minute or more."""
    router_replay: bool = True
    """For a policy with experts: compute each token with the experts with which the servers computed it (R3, arXiv
    2510.11370). Else near-ties of a router fall differently in engine and trainer, and their log-probabilities differ.
    The servers record the experts, one byte for each expert of a token (two from 256 experts on): 384 bytes per token
    with 48 layers and 8 experts of a token. Our engine then makes no use of CUDA graphs, and `compile` leaves out the
    layers' experts."""
    ranks: int = Field(1, ge=1)
    """Number of trainer processes that share every optimizer step."""
    split: list[Literal["critic", "reference"]] = Field(default_factory=list)
    """Roles that run in separate processes, `ranks` processes for each role. The processes run beside those of the
    actor or in a pool for the role. All other roles run in the actor's processes."""
    distributed: DistributedConfig = DistributedConfig()
    torch_threads: int = Field(1, ge=1)
    """CPU threads of each rank."""
    checkpoint_every: int = Field(20, ge=1)
    """Optimizer steps between two checkpoints. This is the largest number of steps that are lost if the trainer
    dies, beside those that it took while the newest checkpoint was being written."""
    keep_checkpoints: int = Field(2, ge=1)
    """Number of newest checkpoints that are kept. With `validation.every`, the one with the highest held-out reward is
    kept too."""
    max_bad_steps: int = Field(5, ge=1)
    """The run fails after this many consecutive steps with a non-finite gradient or without a token to train."""

    @property
    def pass_tokens(self) -> int:
        """Maximum number of tokens per forward pass."""
        return self.tokens_per_microbatch or LEAST_PASS_TOKENS

    @property
    def roles(self) -> list[str]:
        """Return the trainer roles that these settings need."""
        has_reference = self.objective.kl_coef > 0 and self.lora is None  # without its adapters, the policy is one
        needed = {"actor": True, "critic": self.critic is not None, "reference": has_reference}
        return [role for role, is_needed in needed.items() if is_needed]

    def contradictions(self) -> Iterator[str]:
        share = self.distributed.shard_ranks
        if share is not None and self.ranks % share:
            yield f"distributed.shard_ranks ({share}) does not divide ranks ({self.ranks})"
        context = self.distributed.context_ranks
        if self.ranks % context:
            yield f"distributed.context_ranks ({context}) does not divide ranks ({self.ranks})"
        if self.distributed.expert_parallel and self.ranks == 1:
            yield "distributed.expert_parallel needs several ranks that share the experts: set ranks to 2 or more"
        if self.critic is not None and self.advantages.are_of_turns:
            yield f"advantages {self.advantages.name} needs no critic: leave out one of the two"
        if "activations" in self.offload and not self.activation_checkpointing:
            yield "offload names activations: set activation_checkpointing, which makes them few enough to move"
        for role in self.split:
            if role not in self.roles:
                way = "set trainer.critic, or"
                if role == "reference":
                    is_policy = self.lora is not None and self.objective.kl_coef
                    way = "with trainer.lora it is the policy without its adapters;" if is_policy else ""
                    way = way or "set trainer.objective.kl_coef, or"
                yield f"split names {role}, and there is none: {way} leave it out of split"
        if len(set(self.split)) != len(self.split):
            yield f"split names a role twice: {', '.join(self.split)}"
