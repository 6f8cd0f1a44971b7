"""All settings of a run. The defaults are the recommended recipe; a field's docstring is its help text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import product
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from penstock.config.cluster import ClusterConfig
from penstock.config.environments import (
    ATROPOS,
    AtroposOptions,
    DataConfig,
    EnvConfig,
    Environments,
    ValidationConfig,
    with_fallbacks,
)
from penstock.config.loopback import is_loopback
from penstock.config.policy import PolicyConfig
from penstock.config.scheduling import SchedulerConfig
from penstock.config.section import Section
from penstock.config.simulated_cluster import SimulatorConfig
from penstock.config.trainer_settings import UNCORRECTED, TrainerConfig
from penstock.config.trajectory_dump import TOKEN_COLUMNS, DumpConfig, SynthesisConfig
from penstock.types import UpdateMode

ENDPOINT_REQUESTS = 32
"""Most requests to an endpoint at once, unless `scheduler.max_running` says another number."""

COLLECTOR = re.compile(r"https?://[^\s/?#]+(?:/[^\s?#]*)?")
"""The base URL of a collector: a host, and perhaps a port and a path."""


class TinyModelConfig(Section):
    """The built-in policy: a small Qwen3-architecture model with a character-level tokenizer, created by the run."""

    num_layers: int = Field(4, ge=1)
    hidden_size: int = Field(128, ge=8)
    num_heads: int = Field(4, ge=1)
    num_kv_heads: int = Field(2, ge=1)
    intermediate_size: int = Field(384, ge=8)

    def contradictions(self) -> Iterator[str]:
        if self.hidden_size % (2 * self.num_heads):
            yield f"hidden_size ({self.hidden_size}) must be a multiple of 2 * num_heads ({self.num_heads})"
        if self.num_heads % self.num_kv_heads:
            yield f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})"


class WarmStartConfig(Section):
    """Supervised training on the environment's demonstrations, before the first rollout."""

    steps: int = Field(0, ge=0)
    """0 switches the warm start off."""
    batch_size: int = Field(128, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    noise: float = Field(0.0, ge=0, lt=1)
    """Fraction of the demonstrated actions that are replaced by an action from another demonstration. A policy that
    imitates a careless teacher starts at a mediocre level, and the run shows what reinforcement learning adds."""


class ModelConfig(Section):
    """The policy."""

    path: str = "tiny"
    """`tiny`, or a directory with a Hugging Face causal language model and its tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the servers' weights and computation, and of the learner's forward and backward passes. The
    learner's weights and optimizer state are float32. `auto`: bfloat16 on an accelerator, float32 on the CPU."""
    device: str = "auto"
    """Device of the model. `auto` uses an accelerator if there is one, else the CPU."""
    max_context: int = Field(512, ge=8)
    """Longest prompt plus response, in tokens."""
    tool_format: Literal["auto", "deepseek", "glm", "hermes", "llama3", "mistral", "qwen3_coder"] = "auto"
    """Format in which the model calls tools. `auto`: the format that its chat template shows. Set another value if the
    template shows no format, or if the model writes a different one."""
    tiny: TinyModelConfig = TinyModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()


class RolloutConfig(Section):
    """Generation servers."""

    engine: Literal["penstock", "sglang", "vllm"] = "penstock"
    """The inference engine. `penstock` is built in and runs anywhere. `sglang` and `vllm` are started from their own
    Python environment (`python`), or run already (`urls`)."""
    servers: int = Field(1, ge=1)
    urls: list[str] = Field(default_factory=list)
    """Addresses of servers that run already, instead of `servers` that the run starts. In training, they must be able
    to read the files that the trainer writes. `penstock rollout` and `penstock eval` use them with the model that they
    have; `model.path` then only gives the tokenizer."""
    python: str | None = None
    """Python interpreter of the environment that has `engine` installed; the run's own interpreter if unset."""
    args: list[str] = Field(default_factory=list)
    """Additional command-line arguments for a foreign engine."""
    update_mode: UpdateMode | None = None
    """How a weight update treats answers that are being generated. `in_place`: generation continues with the existing
    KV cache (default of `penstock` and `vllm`). `retract` (default of `sglang`): the KV cache is recomputed. Foreign
    engines end the answers then, and generation continues from their recorded tokens. `drain`: the update waits until
    the answers have ended."""
    direct_weights: bool = False
    """Send weights from the trainer's device, and not as a file. vLLM and SGLang copy them in the memory of a device
    that they share with the trainer. On other devices vLLM gets them over NCCL, with its own weight transfer. It is
    paused for the whole way, so this suits a fast network, or servers that share no folder with the trainer."""
    seeded: bool = False
    """Send vLLM a seed for each sample, so that its samples can be repeated. vLLM decodes about 10 % more slowly then.
    Samples of `penstock` always follow from seeds."""
    slots: int = Field(128, ge=1)
    """KV slots per server: the largest decode batch. Our engine lets a sample wait while memory for its keys and values
    is lacking."""
    torch_threads: int = Field(1, ge=1)
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)
    """First port of the servers. 0 lets the system choose. With several servers, the n-th server uses port + n."""
    request_timeout_s: float = Field(120.0, gt=0)
    """Time limit in seconds for short calls between processes. Generation uses the time limits of the episodes
    instead."""
    api_key: str | None = Field(None, repr=False)
    """Key that clients of the servers must send. It is required if `host` is not loopback. If unset, it comes from the
    environment variable PENSTOCK_API_KEY. A run makes a random key for servers that it starts without one."""
    admin_api_key: str | None = Field(None, repr=False)
    """Key for requests that control a server instead of generating. Without it, `api_key` also gives control. If unset,
    it comes from the environment variable PENSTOCK_ADMIN_API_KEY, or the run makes it, like `api_key`. Environment
    workers do not receive it."""

    @property
    def control_key(self) -> str | None:
        """Return the key for requests that control a server."""
        return self.admin_api_key or self.api_key

    @property
    def num_servers(self) -> int:
        """Return the number of servers, started by the run or not."""
        return len(self.urls) or self.servers

    def contradictions(self) -> Iterator[str]:
        if self.urls and self.servers != 1:
            yield f"servers ({self.servers}) are started by the run, urls are running already: give one of them"
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                yield f"urls: {url!r} does not begin with http:// or https://"
        if len(set(self.urls)) != len(self.urls):
            yield f"urls name a server twice: {', '.join(self.urls)}"
        for name in ("python", "args"):
            if getattr(self, name) and (self.engine == "penstock" or self.urls):
                started = "servers that run already" if self.urls else "engine penstock"
                yield f"{name} is for a foreign engine that the run starts, not for {started}"
        if any(word.startswith("--hf-overrides") for word in self.args) and self.engine == "vllm":
            yield "args: --hf-overrides is set already, so that updates reach tied output weights"


class SupervisorConfig(Section):
    """Start, monitoring and stop of the processes of a run."""

    ready_timeout_s: float = Field(120.0, gt=0)
    grace_s: float = Field(60.0, gt=0)
    """Seconds between a stop request and SIGKILL. It should cover at least one optimizer step and one checkpoint."""
    heartbeat_s: float = Field(0.5, gt=0)
    silent_s: float = Field(30.0, gt=0)
    """A process without a heartbeat for this many seconds counts as hung; the supervisor kills and restarts it."""
    hang_s: float = Field(600.0, gt=0)
    """A busy process without progress for this many seconds also counts as hung. Every micro-batch of the trainer is
    progress. So this should cover at least the longest one, the optimizer's step, the publication of weights, and the
    writing of a checkpoint."""
    max_restarts: int = Field(5, ge=0)
    """Restarts of one process allowed within `restart_window_s`; the next loss fails the run. The supervisor does not
    restart a process that was never ready (unless its machine is gone) or that rejects its configuration."""
    restart_window_s: float = Field(600.0, gt=0)
    backoff_s: float = Field(0.2, ge=0)
    """Pause in seconds before a restart. It doubles with each restart within the window, up to `max_backoff_s`."""
    max_backoff_s: float = Field(30.0, ge=0)
    status_interval_s: float = Field(0.0, ge=0)
    """Shortest time in seconds between two status answers for programs (`penstock status --json`, or output that is not
    a terminal). A program that asks sooner gets the time to wait instead. 0 always answers; agents that watch runs have
    used 1800."""

    def contradictions(self) -> Iterator[str]:
        if self.silent_s < 4 * self.heartbeat_s:
            yield f"silent_s ({self.silent_s:g}) must be at least four heartbeats (heartbeat_s is {self.heartbeat_s:g})"


class ObserveConfig(Section):
    """Output for people: progress, plots, samples."""

    progress: bool = True
    """Show live progress in the terminal."""
    plots: bool = True
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow", "swanlab"]] = Field(default_factory=list)
    """Trackers that get an overview of the metrics of every step. They write into the run's directory, unless
    `tracker_upload` is set."""
    tracker_project: str = Field("penstock", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the project, or experiment, in the trackers. It is kept for the whole life of the run."""
    tracker_name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$")
    """Name of the run in the trackers; the run's id if unset. It is kept for the whole life of the run."""
    tracker_upload: bool = False
    """Send the points to the trackers' own services, with their own variables: WANDB_API_KEY, SWANLAB_API_KEY,
    TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, MLFLOW_TRACKING_URI. TensorBoard has no service."""
    metrics_port: int | None = Field(None, ge=0, le=65535)
    """Port at which Prometheus can scrape the whole run, at `/metrics`; 0 lets the system choose. None serves none."""
    metrics_host: str = "127.0.0.1"
    """Address of this endpoint. Clients of another address than loopback must send `rollout.api_key`."""
    opentelemetry: str | None = None
    """Base URL of a collector that takes OTLP over HTTP, such as http://localhost:4318. Each episode becomes a trace
    there. The standard variables `OTEL_*` hold, for example OTEL_EXPORTER_OTLP_HEADERS for a key."""
    samples: int = Field(5, ge=0)
    """Number of held-out tasks for which the closing report shows the answers before and after training."""
    trajectories: int = Field(20, ge=0)
    """Keep one group of each of this many latest optimizer steps for reading, in `trajectories/` of the run: its text,
    and its tokens up to about two megabytes."""

    def contradictions(self) -> Iterator[str]:
        if (address := self.opentelemetry) is not None:
            if not COLLECTOR.fullmatch(address):
                yield f"opentelemetry: {address!r} is not the address of a collector, such as http://localhost:4318"
            if address.rstrip("/").endswith("/v1/traces"):
                yield f"opentelemetry: leave out /v1/traces of {address!r}: the run adds it"


class Config(Section):
    """The configuration of a run."""

    pipeline: Literal["train", "eval", "rollout"] = "train"
    """Kind of the run; the command that starts the run sets it."""
    seed: int = 0
    run_id: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,47}$")
    """Name of the run; made from the date if unset."""
    runs_dir: str = "runs"
    share: Literal["private", "group", "everyone"] = "private"
    """The users who may read the directory of the run: only the user who started it, also the members of the
    directory's group, or all users of the machine. Only the user who started it can write there, stop or resume it."""
    model: ModelConfig = ModelConfig()
    policy: PolicyConfig = PolicyConfig()
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
        """Return whether a trainer process publishes weights. Otherwise the servers load the policy themselves, and
        servers given by `rollout.urls` are used as they are."""
        return self.pipeline == "train"

    @property
    def uses_given_weights(self) -> bool:
        """Return whether the servers run already, and keep the weights that they have."""
        return bool(self.rollout.urls) and not self.has_trainer

    @property
    def gives_devices(self) -> bool:
        """Return whether the servers give their devices to the trainer, again and again."""
        return self.has_trainer and self.scheduler.mode == "colocated"

    @property
    def sends_adapters(self) -> bool:
        """Return whether the trainer sends adapters alone. Otherwise it adds them to the other weights and sends all.

        Our own servers add them to weights that they get from the trainer. A foreign engine must have loaded the
        weights to which they belong (`engine_serves_adapters`).
        """
        is_own = self.has_trainer and self.trainer.lora is not None and self.rollout.engine == "penstock"
        return is_own or self.engine_serves_adapters

    @property
    def engine_serves_adapters(self) -> bool:
        """Return whether the policy's versions are adapters of a foreign engine: the run starts it, and training begins
        with the weights at `model.path`, which the engine loads by itself and keeps. Where it gives its device to the
        trainer, it keeps them in main memory meanwhile."""
        is_ours = self.rollout.engine == "penstock" or bool(self.rollout.urls)
        begins_at_path = self.model.path != "tiny" and not self.model.warm_start.steps
        return self.has_trainer and self.trainer.lora is not None and not is_ours and begins_at_path

    @property
    def broadcasts_to_engines(self) -> bool:
        """Return whether the trainer broadcasts weights to engines of others on other machines. Otherwise these read
        them from a file.

        SGLang takes broadcasts while it is paused. In mode `drain` it is not, and could generate between two of them.
        """
        rollout = self.rollout
        takes_whole = rollout.engine == "sglang" and not self.engine_serves_adapters
        return (self.sends_directly and rollout.engine == "vllm") or (takes_whole and rollout.update_mode != "drain")

    @property
    def sends_directly(self) -> bool:
        """Return whether foreign engines may get weights from the trainer's device."""
        return self.has_trainer and self.rollout.direct_weights

    @property
    def shares_weights_folder(self) -> bool:
        """Return whether engines of others on other machines read published weights in a folder that all machines
        share. The run has no process on the machines of servers at `rollout.urls` that could fetch the weights."""
        rollout = self.rollout
        return rollout.engine != "penstock" and bool(rollout.urls) and not self.broadcasts_to_engines

    @property
    def replays_routers(self) -> bool:
        """Return whether the learner repeats the choices of the servers' routers, if the policy has experts."""
        return self.pipeline == "train" and self.trainer.router_replay

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the trainer's actor."""
        return self.trainer.ranks if self.has_trainer else 1

    @property
    def num_servers(self) -> int:
        """Return the number of rollout servers, started by the run or not. Only the run's own model needs them."""
        return self.rollout.num_servers if self.policy.name == "model" else 0

    @property
    def model_name(self) -> str:
        """Return the name of the model that plays."""
        return {"model": self.model.path, "openai": self.policy.model or ""}.get(self.policy.name, self.policy.name)

    @property
    def max_running(self) -> int:
        """Return how many episodes may generate at once, over all servers."""
        if self.scheduler.max_running is None and self.policy.name == "openai":
            return max(ENDPOINT_REQUESTS, self.env.num_members)
        return self.scheduler.max_running or 2 * self.rollout.slots * self.rollout.num_servers

    @property
    def look_ahead(self) -> int:
        """Return how many groups may be admitted before there is room to start them."""
        return self.scheduler.dispatch.look_ahead or self.trainer.groups_per_step

    @property
    def max_open(self) -> int:
        """Return how many episodes may be open at once, generating or not: the larger of the staleness bound on started
        episodes and `max_running`."""
        groups = max(self.scheduler.max_staleness + 1, math.ceil(self.scheduler.over_sampling))
        return max(groups * self.trainer.groups_per_step * self.env.num_members, self.max_running)

    @property
    def kept_info(self) -> frozenset[str] | None:
        """Return the keys of an environment's `info` that leave the worker with an episode: those that the dump needs.
        None: all, because a filter of the user may look at them."""
        return None if self.scheduler.has_own_filter else self.dump.foreign_columns

    @property
    def environments(self) -> Environments:
        """Return the environments by purpose and tag, with all their settings."""
        return Environments.of(self.env, self.data, self.validation)

    @property
    def validation_tasks(self) -> int:
        """Return the number of held-out tasks. If `validation.tasks` is -1 (whole files), the number is only a lower
        bound."""
        wanted = self.validation.tasks
        own = [settings.data.eval_tasks for settings in self.environments.eval.values()]
        return sum(own) if wanted is None else abs(wanted) * len(own)

    @model_validator(mode="before")
    @classmethod
    def _fall_back(cls, tree: Any) -> Any:
        """Complete the entries of mixtures from `env` and `data`."""
        return with_fallbacks(tree) if isinstance(tree, dict) else tree

    def contradictions(self) -> Iterator[str]:
        for key, settings in self.environments.by_key.items() if self.policy.has_tokens else ():
            if settings.max_new_tokens >= self.model.max_context:
                yield (
                    f"{key}.max_new_tokens ({settings.max_new_tokens}) must be smaller than "
                    f"model.max_context ({self.model.max_context}): the prompt needs room too"
                )
        yield from self._of_validation()
        if self.pipeline == "train":
            yield from self._of_training()
        if ATROPOS in (self.env.name, *self.environments.names):
            yield from self._of_atropos()
        if self.max_running < self.env.num_members:
            yield (
                f"scheduler.max_running ({self.max_running}) is smaller than env.group_size + env.redundancy "
                f"({self.env.num_members}): no group could ever start"
            )
        if not self.policy.has_tokens:
            yield from self._of_other_policies()
        yield from self._of_servers()

    def _of_other_policies(self) -> Iterator[str]:
        """Yield the settings that need the tokens of a model."""
        playing = f"policy.name {self.policy.name} has messages, and no tokens"
        columns = [column.name for column in self.dump.columns if column.name in TOKEN_COLUMNS]
        if columns:
            yield f"dump.columns: {', '.join(columns)}: {playing} or log-probabilities: remove the columns"
        for name in ("segment_length", "max_segment_count", "global_max_length"):
            if getattr(self.scheduler, name) is not None:
                yield f"scheduler.{name} counts tokens, and {playing}: set it to null"
        if self.rollout.urls:
            yield f"rollout.urls are servers of policy.name model, and {self.policy.name} plays: remove one of them"
        if ATROPOS in (self.env.name, *self.environments.names):
            yield f"env.name atropos trains on tokens, and {playing}: use policy.name model"

    def _of_validation(self) -> Iterator[str]:
        samples = self.validation.samples
        for tag, settings in self.environments.eval.items():
            if samples > 1 and settings.eval_temperature == 0:
                yield (
                    f"validation.samples ({samples}) would all be the same answer to {tag}, because its "
                    "eval_temperature is 0: set env.eval_temperature above 0, or validation.samples to 1"
                )
            if self.validation.tasks == -1 and not settings.data.has_rows:
                yield (
                    f"validation.tasks -1 means all tasks, and data.source {settings.data.source} of {tag} has no end: "
                    "set validation.tasks to a number"
                )
        environments = self.environments
        pairs = product(environments.eval.items(), environments.train.items()) if self.validation_tasks else ()
        for (holder, held), (learner, trained) in pairs:
            if held.data.num_held_out_of(trained.data) > trained.data.num_held_out_of(trained.data):
                yield (
                    f"data.path {held.data.path}: {holder} holds out its last {held.data.eval_tasks} rows, and "
                    f"{learner} trains on some of them: give both the same data.eval_tasks, and neither an eval_path"
                )
        if samples > self.max_running:
            yield (
                f"validation.samples ({samples}) exceeds the episodes that may run at once (scheduler.max_running, "
                f"{self.max_running}): no task could ever start"
            )

    def _of_training(self) -> Iterator[str]:
        if self.env.group_size == 1 and self.scheduler.drops_equal_rewards:
            yield "env.group_size 1 leaves every group with equal rewards and nothing to train on: use at least 2"
        if self.trainer.critic is not None and self.scheduler.drops_equal_rewards:
            yield (
                "trainer.critic learns from groups of equal rewards too, which scheduler.group_filter zero_variance "
                "drops: set it to []"
            )
        if self.trainer.advantages.are_of_turns and self.scheduler.drops_equal_rewards:
            yield (
                f"trainer.advantages {self.trainer.advantages.name} learns from episodes of equal rewards too, which "
                "scheduler.group_filter zero_variance drops: set it to []"
            )
        if self.trainer.advantages.are_of_turns and self.env.formulation == "trajectory":
            yield (
                f"trainer.advantages {self.trainer.advantages.name} compares all turns, and env.formulation trajectory "
                "leaves some out: use branches or step"
            )
        if self.env.formulation == "step" and (self.trainer.critic or "samples" in self.trainer.scale_learning_rate):
            yield (
                "env.formulation step shares a group's advantages among turns and makes as many samples as there are "
                "turns: use it without trainer.critic and without `samples` in trainer.scale_learning_rate"
            )
        objective = self.trainer.objective.name
        if (self.env.top_p < 1 or self.env.top_k > 0) and objective not in UNCORRECTED:
            yield (
                f"env.top_p ({self.env.top_p:g}) and env.top_k ({self.env.top_k}) sample from fewer tokens than the "
                f"probabilities that trainer.objective {objective} divides by: set top_p to 1 and top_k to 0, or "
                f"choose one of {', '.join(UNCORRECTED)}"
            )
        batch, trigger = self.trainer.groups_per_step * self.env.group_size, self.scheduler.trigger
        shared = self.trainer.distributed.context_ranks
        for name, least in (
            ("trainer.ranks" + (" / distributed.context_ranks" if shared > 1 else ""), self.trainer.ranks // shared),
            ("scheduler.trigger.min_samples", trigger.samples_of(batch)),
            ("scheduler.trigger.feedback.fewest_samples", trigger.feedback.fewest_samples),
        ):
            if least > batch:
                step = f"the samples of a step (trainer.groups_per_step * env.group_size = {batch})"
                yield f"{name} ({least}) exceeds {step}"

    def _of_servers(self) -> Iterator[str]:
        rollout = self.rollout
        if rollout.port and rollout.port + rollout.servers - 1 > 65535:
            yield (
                f"rollout.port ({rollout.port}) leaves no room for rollout.servers ({rollout.servers}) "
                "ports up to 65535: choose a lower port, or 0 to let the system choose"
            )
        if rollout.direct_weights and self.has_trainer:
            yield from self._of_direct_weights()
        loads_itself = rollout.engine != "penstock" and not (self.has_trainer or rollout.urls)
        if loads_itself and self.policy.name == "model" and self.model.path == "tiny":
            yield (
                f"model.path tiny has no weights that rollout.engine {rollout.engine} could load: give --checkpoint, "
                "set model.path to a model directory, or use rollout.engine penstock"
            )
        if self.cluster.address and rollout.engine == "penstock" and rollout.urls and not rollout.control_key:
            yield (
                "rollout.urls: on a cluster the trainer sends weights over the network to any client with the servers' "
                "key: start them with one, and set it here through the environment variable PENSTOCK_API_KEY"
            )
        observe, is_open = self.observe, not rollout.api_key
        if is_open and observe.metrics_port is not None and not is_loopback(observe.metrics_host):
            yield (
                f"observe.metrics_host {observe.metrics_host} is reachable from outside: set rollout.api_key "
                "through the environment variable PENSTOCK_API_KEY, or use 127.0.0.1"
            )
        if is_open and not is_loopback(rollout.host):
            yield (
                f"rollout.host {rollout.host} is reachable from outside: set rollout.api_key "
                "through the environment variable PENSTOCK_API_KEY, or use 127.0.0.1"
            )

    def _of_direct_weights(self) -> Iterator[str]:
        """Yield what keeps weights from going directly from the trainer's device to the servers."""
        is_ours = self.rollout.engine == "penstock"
        for name, value, is_wrong, why in (
            ("rollout.engine", self.rollout.engine, is_ours, "our own servers map the file"),
            ("trainer.ranks", self.trainer.ranks, self.trainer.ranks > 1, "no single rank has all weights"),
            ("model.device", "cpu", self.model.device == "cpu", "the weights are on no CUDA device"),
            ("scheduler.mode", "colocated", self.gives_devices, "the weights have left the device by then"),
            ("trainer.lora", "set", self.engine_serves_adapters, "the engines read adapters from files"),
        ):
            if is_wrong:
                yield f"{name} is {value}, so rollout.direct_weights must be false: {why}"

    def _of_atropos(self) -> Iterator[str]:
        """Yield the settings that Atropos environments cannot follow."""
        env, data, scheduler = self.env, self.data, self.scheduler
        if env.mixture or self.validation.mixture:
            yield (
                "env.name atropos is for a run of its own: remove env.mixture and validation.mixture, or play the "
                "other environments in another run"
            )
        try:
            AtroposOptions.model_validate(env.options)
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            yield f"env.options of env.name atropos are {', '.join(AtroposOptions.model_fields)}; {wrong}"
        for name, value, only, why in (
            ("data.source", data.source, "seeds", "such environments choose their own tasks"),
            ("data.eval_tasks", data.eval_tasks, 0, "such environments evaluate by themselves"),
            ("validation.tasks", self.validation_tasks, 0, "such environments evaluate by themselves"),
            ("env.workers", env.workers, 1, "all such environments push to one address"),
            ("env.redundancy", env.redundancy, 0, "such environments play whole groups"),
            ("env.manager", env.manager, None, "such environments run their own loop"),
            ("model.warm_start.steps", self.model.warm_start.steps, 0, "such environments show no demonstrations"),
            ("scheduler.segment_length", scheduler.segment_length, None, "answers of such environments are never cut"),
        ):
            if value != only:
                shown = "null" if only is None else only
                yield f"{name} is {value}, and with env.name atropos it must be {shown}: {why}"
        if scheduler.dispatch.policy == "probe":
            yield "scheduler.dispatch.policy probe plays single members first, and Atropos environments whole groups"
        if scheduler.mode == "colocated":
            yield "scheduler.mode colocated takes the servers away from Atropos environments: use another mode"
