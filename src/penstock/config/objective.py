"""Settings of the policy objective: which, how it is bounded, what it is divided by."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.config.section import Section

ObjectiveName = Literal[
    "ppo",
    "pois",
    "reinforce",
    "decoupled",
    "tis",
    "sequence_tis",
    "sequence_mis",
    "geometric_mask",
    "cispo",
    "gspo",
    "topr",
    "icepop",
    "m2po",
]

UNCORRECTED: tuple[ObjectiveName, ...] = ("reinforce", "pois")
"""Those that never look at the policy that sampled."""

OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "decoupled": {"proximal": "interpolated"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "normalize": "sequence"},
    "geometric_mask": {"mask_low": 0.99, "mask_high": 1.01},
}
"""Where an objective's own source differs from the common defaults."""


_CLIPPED: tuple[ObjectiveName, ...] = ("ppo", "decoupled", "geometric_mask", "gspo", "icepop")

READ_BY: dict[str, tuple[ObjectiveName, ...]] = {
    "clip_low": (*_CLIPPED, "cispo"),
    "clip_high": (*_CLIPPED, "cispo"),
    "dual_clip": _CLIPPED,
    "weight_cap": ("tis", "sequence_tis", "sequence_mis", "decoupled"),
    "mask_low": ("icepop", "geometric_mask"),
    "mask_high": ("icepop", "geometric_mask"),
    "second_moment": ("m2po",),
    "proximal": ("decoupled", "icepop"),
}
"""Settings that mean nothing to the other objectives."""


class MasteredConfig(Section):
    """Leaves out what the policy already does: tokens it is sure of, in samples better than their group, while the
    sample's mean entropy is low (UloRL's DMMPT, arXiv 2507.19766, section 3.3: keeps entropy from collapsing)."""

    probability: float = Field(0.99, gt=0, lt=1)
    """Tokens at least this likely."""
    entropy: float = Field(0.2, gt=0)
    """Nats per token; samples whose mean is below."""


class CanaryConfig(Section):
    """When the learner says that something is wrong."""

    max_parity_gap: float = Field(0.05, gt=0)
    """Nats per token: mean |log-probability by the trainer - by the engine| where the same version made both."""
    parity_every: int | None = Field(20, ge=1)
    """Steps without such a token (everything trained is older) after which a copy of the policy is kept until samples
    that it made arrive; None saves its memory and looks only where there is something to compare."""
    min_ess: float = Field(0.2, ge=0, le=1)
    """Effective sample size of the importance weights: (sum w)^2 / (N sum w^2) over the step's tokens."""


class CriticConfig(Section):
    """A value function instead of the group's mean as the baseline (PPO with generalized advantages)."""

    learning_rate: float = Field(1e-3, gt=0)
    discount: float = Field(1.0, gt=0, le=1)
    trace: float = Field(0.95, ge=0, le=1)
    """Lambda: 0 trusts the next token's value, 1 only the reward."""
    clip: float = Field(0.2, gt=0)
    """How far a value may move per step before the loss sees it, in units of reward."""


class LoraConfig(Section):
    """Low-rank adapters: only they are trained; servers get them merged into the weights."""

    rank: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    """Adapters count alpha / rank times."""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """Linear layers, by the ends of their names."""


class DistributedConfig(Section):
    """How the ranks of a learner share its work."""

    strategy: Literal["ddp", "fsdp"] = "ddp"
    """`ddp`: each has all weights; gradients are summed once per step. `fsdp`: each has a share of weights, gradients
    and optimizer, and layers are gathered as they are needed: less memory, more talk, and prompts are not shared."""
    backend: Literal["gloo", "nccl", "hccl"] | None = None
    """What carries tensors between ranks; if unset, what suits the device. `hccl` needs the package torch_npu."""


class ObjectiveConfig(Section):
    """What the policy is trained to maximise. Formulas are in `trainer/losses/objective.py`."""

    name: ObjectiveName = "ppo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    """Clip of a ratio to [1 - clip_low, 1 + clip_high] (DAPO's clip-higher). `gspo`: 3e-4 and 4e-4."""
    dual_clip: float | None = Field(None, gt=1)
    """Where A < 0 the loss is at most this times -A."""
    weight_cap: float = Field(2.0, gt=0)
    """`tis`, `sequence_tis`, `sequence_mis`, `decoupled`: largest importance weight."""
    mask_low: float = Field(0.5, ge=0)
    mask_high: float = Field(5.0, gt=0)
    """`icepop`: ratios of single tokens that are trained. `geometric_mask`: of samples, 0.99 and 1.01."""
    second_moment: float = Field(0.04, gt=0)
    """`m2po`: largest mean of squared log-ratios."""
    proximal: Literal["current", "interpolated", "snapshot"] = "current"
    """`decoupled`, `icepop`: the policy the clip is centred on. `current`: the one being trained, as it was at the
    beginning of the step: with one update per batch nothing is ever clipped then, only weighed. `interpolated`
    (`decoupled`): one version behind, estimated (A-3PO). `snapshot`: a copy that is renewed every `proximal_every`
    steps and computed anew, at the cost of a forward pass."""
    proximal_every: int = Field(4, ge=1)
    """Optimizer steps."""
    normalize: Literal["token", "sequence", "constant"] = "token"
    """What the sum over tokens is divided by. `token`: all tokens of the step (DAPO). `sequence`: each sample's tokens,
    then the samples (GRPO). `constant`: samples times the longest answer allowed (Dr. GRPO, arXiv 2503.20783)."""
    segments: Literal["all", "newest"] = "all"
    """`newest`: of an answer that several versions made, only the newest one's tokens are trained; what lies before is
    context."""
    kl_coef: float = Field(0.0, ge=0)
    """Times KL(pi, reference), estimated per token by k3; the reference is the policy as training began."""
    mastered: MasteredConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _own_defaults(cls, tree: Any) -> Any:
        return OWN_DEFAULTS.get(tree.get("name", "ppo"), {}) | tree if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _consistent(self) -> ObjectiveConfig:
        for setting, readers in READ_BY.items():
            if self.name not in readers and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f"{self.name} does not read {setting}; {', '.join(readers)} do")
        if self.name == "icepop" and self.proximal == "interpolated":
            raise ValueError("icepop has no interpolated proximal policy: choose current or snapshot")
        if self.mask_low >= self.mask_high:
            raise ValueError(f"mask_low ({self.mask_low:g}) must be below mask_high ({self.mask_high:g})")
        return self
