"""Every setting of a run. The defaults are the recommended recipe; a field's docstring is its help text."""

from __future__ import annotations

import math
from itertools import product
from typing import Any, Literal

from pydantic import Field, model_validator

from penstock.config.atropos import ATROPOS, check_atropos
from penstock.config.cluster import ClusterConfig
from penstock.config.dump import DumpConfig, SynthesisConfig
from penstock.config.environments import DataConfig, EnvConfig, Environments, ValidationConfig, with_fallbacks
from penstock.config.objective import (
    UNCORRECTED,
    CanaryConfig,
    CriticConfig,
    DistributedConfig,
    LoraConfig,
    ObjectiveConfig,
)
from penstock.config.scheduling import SchedulerConfig
from penstock.config.section import Section
from penstock.config.simulation import SimulatorConfig
from penstock.types import UpdateMode


class TinyModelConfig(Section):
    """The built-in policy: a Qwen3-architecture model with a character-level tokenizer, made on the spot."""

    num_layers: int = Field(4, ge=1)
    hidden_size: int = Field(128, ge=8)
    num_heads: int = Field(4, ge=1)
    num_kv_heads: int = Field(2, ge=1)
    intermediate_size: int = Field(384, ge=8)

    @model_validator(mode="after")
    def _divisible(self) -> TinyModelConfig:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(f"hidden_size ({self.hidden_size}) must be a multiple of 2 * num_heads ({self.num_heads})")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        return self


class WarmStartConfig(Section):
    """Imitation of the environment's own demonstrations before the first rollout."""

    steps: int = Field(0, ge=0)
    """0 switches the warm start off."""
    batch_size: int = Field(128, ge=1)
    learning_rate: float = Field(2e-3, gt=0)


class ModelConfig(Section):
    """The policy."""

    path: str = "tiny"
    """`tiny`, or a directory with a Hugging Face causal language model and its tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What servers hold and compute in, and the learner's forward and backward passes; its weights and optimizer are
    float32. `auto`: bfloat16 on an accelerator, float32 on the CPU."""
    device: str = "auto"
    """`auto` takes an accelerator where there is one, else the CPU."""
    max_context: int = Field(512, ge=8)
    """Longest prompt plus response, in tokens."""
    tiny: TinyModelConfig = TinyModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()


class RolloutConfig(Section):
    """Generation servers."""

    engine: Literal["penstock", "sglang", "vllm"] = "penstock"
    """What generates. Ours runs anywhere; the others are started from an environment of their own (`python`), or run
    already (`urls`)."""
    servers: int = Field(1, ge=1)
    urls: list[str] = Field(default_factory=list)
    """Servers that run already, instead of `servers` that we start. They must see the files that the trainer writes."""
    python: str | None = None
    """Interpreter of the environment that `engine` is installed in; ours if unset."""
    args: list[str] = Field(default_factory=list)
    """More arguments for the command line of a foreign engine."""
    update_mode: UpdateMode | None = None
    """What becomes of running answers when new weights come. `in_place`: they go on over their keys and values (ours,
    if unset). `retract`: these are computed anew (foreign engines, if unset: they end the answers, which go on from
    their recorded tokens). `drain`: they end first."""
    slots: int = Field(128, ge=1)
    """KV slots per server: the largest decode batch."""
    torch_threads: int = Field(1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """0 lets the system choose. With several servers, the n-th takes port + n."""
    request_timeout_s: float = Field(120.0, gt=0)
    """For calls between processes that need little work. Answers have the deadlines of their episodes."""
    api_key: str | None = Field(None, repr=False)
    """Needed when `host` is not loopback; taken from the environment variable PENSTOCK_API_KEY if unset."""
    admin_api_key: str | None = Field(None, repr=False)
    """Needed then for all that controls a server instead of generating; without it `api_key` is good for both. Taken
    from the environment variable PENSTOCK_ADMIN_API_KEY if unset. Environment workers do not get it."""

    @property
    def control_key(self) -> str | None:
        """What opens the servers' control paths."""
        return self.admin_api_key or self.api_key

    @property
    def num_servers(self) -> int:
        """Ours and foreign ones."""
        return len(self.urls) or self.servers

    @model_validator(mode="after")
    def _engine_settings_fit(self) -> RolloutConfig:
        if self.urls and self.servers != 1:
            raise ValueError(f"servers ({self.servers}) are started by us, urls are running already: give one of them")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: {url!r} does not begin with http:// or https://")
        if len(set(self.urls)) != len(self.urls):
            raise ValueError(f"urls name a server twice: {', '.join(self.urls)}")
        for name in ("python", "args"):
            if getattr(self, name) and (self.engine == "penstock" or self.urls):
                started = "servers that run already" if self.urls else "engine penstock"
                raise ValueError(f"{name} is for a foreign engine that we start, not for {started}")
        if any(word.startswith("--hf-overrides") for word in self.args) and self.engine == "vllm":
            raise ValueError("args: --hf-overrides is set already, so that updates reach tied output weights")
        return self


class TrainerConfig(Section):
    """The learner."""

    steps: int = Field(100, ge=1)
    """Optimizer steps of the whole run, at most."""
    total_samples: int | None = Field(None, ge=1)
    """End with the step that brings the samples trained to this many, for runs whose steps differ in size."""
    groups_per_step: int = Field(32, ge=1)
    """Groups per optimizer step (B); B * group_size samples."""
    learning_rate: float = Field(3e-4, gt=0)
    warmup_steps: int = Field(10, ge=0)
    """Steps over which the rate rises. An optimizer that has seen nothing takes its first gradients for typical ones,
    and undoes part of what the policy already knew."""
    scale_learning_rate: list[Literal["samples", "ess"]] = Field(default_factory=list)
    """`samples`: times the square root of the step's samples over those of `groups_per_step` whole groups. `ess`: times
    the square root of the samples' effective size under their importance weights, so that data far from the policy
    move it less (VCPO, arXiv 2602.17616)."""
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig | None = None
    """None: a group's own mean is the baseline (GRPO)."""
    lora: LoraConfig | None = None
    """None trains all weights."""
    canaries: CanaryConfig = CanaryConfig()
    normalize_advantages: bool = True
    """Divide group advantages by the group's standard deviation (GRPO)."""
    tokens_per_microbatch: int = Field(8192, ge=1)
    """Padded tokens per forward pass."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time; prompts are not shared then."""
    ranks: int = Field(1, ge=1)
    """Processes that share every optimizer step."""
    split: list[Literal["critic", "reference"]] = Field(default_factory=list)
    """Roles that run in processes of their own, `ranks` of each, beside the actor's or in a pool of theirs. The others
    share its processes."""
    distributed: DistributedConfig = DistributedConfig()
    torch_threads: int = Field(1, ge=1)
    """Of each rank."""
    checkpoint_every: int = Field(20, ge=1)
    """Steps: what the death of the trainer costs, at most."""
    keep_checkpoints: int = Field(2, ge=1)
    max_bad_steps: int = Field(5, ge=1)
    """Steps in a row with a non-finite gradient, or without a token to train, before the run is failed."""

    @property
    def roles(self) -> list[str]:
        """Those that these settings need."""
        needed = {"actor": True, "critic": self.critic is not None, "reference": self.objective.kl_coef > 0}
        return [role for role, is_needed in needed.items() if is_needed]

    @model_validator(mode="after")
    def _splits_what_is_there(self) -> TrainerConfig:
        for role in self.split:
            if role not in self.roles:
                setting = {"critic": "trainer.critic", "reference": "trainer.objective.kl_coef"}[role]
                raise ValueError(f"split names {role}, and there is none: set {setting}, or leave it out of split")
        if len(set(self.split)) != len(self.split):
            raise ValueError(f"split names a role twice: {', '.join(self.split)}")
        return self


class SupervisorConfig(Section):
    """Starting, watching and stopping the processes of a run."""

    ready_timeout_s: float = Field(120.0, gt=0)
    grace_s: float = Field(60.0, gt=0)
    """Between a request to stop and SIGKILL: at least an optimizer step and a checkpoint."""
    heartbeat_s: float = Field(0.5, gt=0)
    silent_s: float = Field(30.0, gt=0)
    """A process that gives no heartbeat for so long is taken for hung: killed and restarted."""
    hang_s: float = Field(600.0, gt=0)
    """So is one that is busy, and gets no further for so long: at least the longest optimizer step."""
    max_restarts: int = Field(5, ge=0)
    """Of one process within `restart_window_s`; the next loss fails the run. A process that was never ready, or refuses
    its configuration, is not restarted."""
    restart_window_s: float = Field(600.0, gt=0)
    backoff_s: float = Field(0.2, ge=0)
    """Pause before a restart. It doubles with each within the window, up to `max_backoff_s`."""
    max_backoff_s: float = Field(30.0, ge=0)
    status_interval_s: float = Field(0.0, ge=0)
    """How often programs (`penstock status --json`, or without a terminal) are told the status of a run; asked sooner,
    they are told when. 0 always answers; the rule for agents that look after runs was 1800."""

    @model_validator(mode="after")
    def _hears_several_beats(self) -> SupervisorConfig:
        if self.silent_s < 4 * self.heartbeat_s:
            raise ValueError(
                f"silent_s ({self.silent_s:g}) must be at least four heartbeats (heartbeat_s is {self.heartbeat_s:g})"
            )
        return self


class ObserveConfig(Section):
    """What people see."""

    progress: bool = True
    """Live progress in the terminal."""
    plots: bool = True
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Write every step's numbers for these too, into the run's directory."""
    samples: int = Field(5, ge=0)
    """Held-out tasks whose answers before and after are shown."""
    trajectories: int = Field(20, ge=0)
    """Optimizer steps of which one group is kept to be read, the latest ones, in `trajectories/` of the run."""


class Config(Section):
    """A run."""

    pipeline: Literal["train", "eval", "rollout"] = "train"
    """What is done: set by the command that begins the run."""
    seed: int = 0
    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$")
    """Chosen from the date if unset."""
    runs_dir: str = "runs"
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    validation: ValidationConfig = ValidationConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    observe: ObserveConfig = ObserveConfig()
    synthesis: SynthesisConfig = SynthesisConfig()
    dump: DumpConfig = DumpConfig()
    simulator: SimulatorConfig = SimulatorConfig()
    cluster: ClusterConfig = ClusterConfig()

    @property
    def has_trainer(self) -> bool:
        """Somebody makes weights and publishes them; else the servers load the policy themselves. Those of other
        engines, and those that somebody else started, cannot, and are given what is evaluated."""
        given = self.rollout.engine != "penstock" or bool(self.rollout.urls)
        return self.pipeline == "train" or (self.pipeline == "eval" and given)

    @property
    def num_ranks(self) -> int:
        """Of the trainer's actor; one that only publishes needs no others."""
        return self.trainer.ranks if self.pipeline == "train" else 1

    @property
    def max_running(self) -> int:
        """Episodes that may generate at once, over all servers."""
        return self.scheduler.max_running or 2 * self.rollout.slots * self.rollout.num_servers

    @property
    def look_ahead(self) -> int:
        """Groups that may be admitted before there is room to start them."""
        return self.scheduler.dispatch.look_ahead or self.trainer.groups_per_step

    @property
    def max_open(self) -> int:
        """Episodes that may be open at once, generating or not: what pacing lets start, or what may generate."""
        groups = max(self.scheduler.max_staleness + 1, math.ceil(self.scheduler.over_sampling))
        return max(groups * self.trainer.groups_per_step * self.env.num_members, self.max_running)

    @property
    def environments(self) -> Environments:
        """The environments by purpose and tag, with all their settings."""
        return Environments.of(self.env, self.data, self.validation)

    @property
    def validation_tasks(self) -> int:
        """How many held-out tasks are played; at least so many, where whole files of them are."""
        wanted = self.validation.tasks
        own = [settings.data.eval_tasks for settings in self.environments.eval.values()]
        return sum(own) if wanted is None else abs(wanted) * len(own)

    @model_validator(mode="before")
    @classmethod
    def _fall_back(cls, tree: Any) -> Any:
        """What an entry of a mixture leaves open, `env` and `data` say."""
        return with_fallbacks(tree) if isinstance(tree, dict) else tree

    @model_validator(mode="after")
    def _leave_room_for_prompts(self) -> Config:
        for key, settings in self.environments.by_key.items():
            if settings.max_new_tokens >= self.model.max_context:
                raise ValueError(
                    f"{key}.max_new_tokens ({settings.max_new_tokens}) must be smaller than "
                    f"model.max_context ({self.model.max_context}): the prompt needs room too"
                )
        return self

    @model_validator(mode="after")
    def _can_validate(self) -> Config:
        samples = self.validation.samples
        for tag, settings in self.environments.eval.items():
            if samples > 1 and settings.eval_temperature == 0:
                raise ValueError(
                    f"validation.samples ({samples}) would all be the same answer to {tag}, whose eval_temperature is "
                    "0: set env.eval_temperature above 0, or validation.samples to 1"
                )
            if self.validation.tasks == -1 and not settings.data.has_rows:
                raise ValueError(
                    f"validation.tasks -1 is every task there is, and data.source {settings.data.source} of {tag} has "
                    "no end: set validation.tasks to a number"
                )
        if self.validation_tasks:
            self._check_held_out()
        if samples > self.max_running:
            raise ValueError(
                f"validation.samples ({samples}) exceeds the episodes that may run at once (scheduler.max_running, "
                f"{self.max_running}): no task could ever start"
            )
        return self

    def _check_held_out(self) -> None:
        """Nobody trains on rows of a file that somebody else holds out."""
        environments = self.environments
        for (holder, held), (learner, trained) in product(environments.eval.items(), environments.train.items()):
            if held.data.num_held_out_of(trained.data) > trained.data.num_held_out_of(trained.data):
                raise ValueError(
                    f"data.path {held.data.path}: {holder} holds out its last {held.data.eval_tasks} rows, and "
                    f"{learner} trains on some of them: give both the same data.eval_tasks, and neither an eval_path"
                )

    @model_validator(mode="after")
    def _can_train(self) -> Config:
        if self.pipeline != "train":
            return self
        if self.env.group_size == 1 and self.scheduler.drops_equal_rewards:
            raise ValueError(
                "env.group_size 1 leaves every group with equal rewards and nothing to train on: use at least 2"
            )
        if self.trainer.critic is not None and self.scheduler.drops_equal_rewards:
            raise ValueError(
                "trainer.critic learns from groups of equal rewards too, which scheduler.group_filter zero_variance "
                "drops: set it to []"
            )
        if self.env.formulation == "step" and (self.trainer.critic or "samples" in self.trainer.scale_learning_rate):
            raise ValueError(
                "env.formulation step shares a group's advantages among turns and makes as many samples as there are "
                "turns: use it without trainer.critic and without `samples` in trainer.scale_learning_rate"
            )
        restricted = self.env.top_p < 1 or self.env.top_k > 0
        if restricted and self.trainer.objective.name not in UNCORRECTED:
            raise ValueError(
                f"env.top_p ({self.env.top_p:g}) and env.top_k ({self.env.top_k}) sample from fewer tokens than the "
                f"probabilities that trainer.objective {self.trainer.objective.name} divides by are taken over: set "
                f"top_p to 1 and top_k to 0, or choose one of {', '.join(UNCORRECTED)}"
            )
        batch = self.trainer.groups_per_step * self.env.group_size
        if batch < self.trainer.ranks:
            raise ValueError(
                f"trainer.ranks ({self.trainer.ranks}) exceeds the samples of a step "
                f"(trainer.groups_per_step * env.group_size = {batch}): some would never have one"
            )
        if (min_samples := self.scheduler.trigger.samples_of(batch)) > batch:
            raise ValueError(
                f"scheduler.trigger.min_samples ({min_samples}) exceeds the samples of a step "
                f"(trainer.groups_per_step * env.group_size = {batch})"
            )
        fewest = self.scheduler.trigger.feedback.fewest_samples
        if fewest > batch:
            raise ValueError(
                f"scheduler.trigger.feedback.fewest_samples ({fewest}) exceeds the samples of a step "
                f"(trainer.groups_per_step * env.group_size = {batch})"
            )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if ATROPOS in (self.env.name, *self.environments.names):
            check_atropos(self)
        if self.max_running < self.env.num_members:
            raise ValueError(
                f"scheduler.max_running ({self.max_running}) is smaller than env.group_size + env.redundancy "
                f"({self.env.num_members}): no group could ever start"
            )
        if self.rollout.port and self.rollout.port + self.rollout.servers - 1 > 65535:
            raise ValueError(
                f"rollout.port ({self.rollout.port}) leaves no room for rollout.servers ({self.rollout.servers}) "
                "ports up to 65535: choose a lower port, or 0 to let the system choose"
            )
        if self.rollout.engine != "penstock" and self.scheduler.mode == "colocated":
            raise ValueError(
                f"scheduler.mode colocated has servers give way to the trainer, which rollout.engine "
                f"{self.rollout.engine} does not do here: use rollout.engine penstock or another mode"
            )
        if self.rollout.engine != "penstock" and not self.has_trainer:
            raise ValueError(
                f"pipeline {self.pipeline} has nobody who publishes weights, and rollout.engine {self.rollout.engine} "
                "waits for them: use rollout.engine penstock"
            )
        gives_out = self.cluster.address is not None and self.rollout.engine == "penstock"
        if gives_out and self.rollout.urls and not self.rollout.control_key:
            raise ValueError(
                "rollout.urls: on a cluster the trainer gives weights out over the network, to whoever has the "
                "servers' key: start them with one, and set it here through the environment variable PENSTOCK_API_KEY"
            )
        if self.rollout.host not in ("127.0.0.1", "localhost", "::1") and not self.rollout.api_key:
            raise ValueError(
                f"rollout.host {self.rollout.host} is reachable from outside: set rollout.api_key "
                "through the environment variable PENSTOCK_API_KEY, or use 127.0.0.1"
            )
        return self
