"""Settings of `penstock simulate`: the modelled machines and the work they are given."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.config.section import Section

Strategy = Literal[
    "configured",
    "synchronous",
    "colocated",
    "one_step_off",
    "asynchronous",
    "over_sampling",
    "tail_batching",
    "segments",
]
"""`configured` is the scheduler section as it stands. The others take what they leave open from there."""


class EngineModelConfig(Section):
    """A rollout server: how long a decode step takes, and what fits."""

    step_s: float = Field(0.012, gt=0)
    """One decode step (a token for every active sequence), the part that does not depend on how many there are."""
    sequence_s: float = Field(0.0002, ge=0)
    """Added to a decode step by each active sequence."""
    context_token_s: float = Field(0.0, ge=0)
    """Added to a decode step by each token that the active sequences hold: their keys and values are read."""
    prefill_token_s: float = Field(5e-6, ge=0)
    """Added by each token of a prompt when it enters, and by each token of a context that goes on in another grant:
    every generate call computes its whole context. Members of a group that enter together share it."""
    admit_share: float = Field(0.0, ge=0, le=1)
    """Share of the slots that must be free before answers to the first prompt in line enter, unless fewer are left of
    it; 0 fills every slot at once. Penstock's own engine waits for an eighth, so as to compute prompts rarely."""
    admit_tokens: int | None = Field(None, ge=1)
    """Prompt tokens that enter in one step, unless a single prompt is longer; None is no limit. Penstock's own engine
    takes 4096."""
    kv_tokens: int | None = Field(None, ge=1)
    """Tokens of all active sequences, at their final length, that fit into memory; None is no limit."""
    update_s: float = Field(1.0, ge=0)
    """How long a weight update holds a server up."""
    latency_s: float = Field(0.0, ge=0)
    """Between the scheduler's decision and the server, and back, in all: per grant."""


class TrainerModelConfig(Section):
    """The learner: how long it takes."""

    token_s: float = Field(2e-6, ge=0)
    """Per token trained, prompt included."""
    call_s: float = Field(0.0, ge=0)
    """Per call of accumulate."""
    step_s: float = Field(1.0, ge=0)
    """Per optimizer step."""
    publish_s: float = Field(0.0, ge=0)
    """Writing the weights where servers can read them."""


class WorkloadConfig(Section):
    """Where lengths come from."""

    source: Literal["lognormal", "trace", "run"] = "lognormal"
    """`lognormal`: a hierarchical model. `trace`: a file. `run`: the episodes of a run of Penstock."""
    path: str | None = None
    """Of the trace (.jsonl, .csv or .parquet with columns task_id and response_tokens, and if there are any
    prompt_tokens, turn and tool_s), or the run's directory."""
    median_tokens: float = Field(4000.0, gt=0)
    between_sigma: float = Field(0.77, ge=0)
    """Standard deviation of log length between prompts (reasoning models .77, base models .22)."""
    within_sigma: float = Field(0.23, ge=0)
    """Standard deviation of log length between the answers to one prompt (reasoning models .23, base models .90)."""
    runaway_share: float = Field(0.0, ge=0, le=1)
    """Answers that run into the cap whatever their length should have been."""
    max_tokens: int = Field(16_000, ge=1)
    """The cap on an answer, over all turns."""
    prompt_tokens: int = Field(512, ge=0)
    turns: int = Field(1, ge=1)
    """Most turns of an episode; each has uniformly one to this many."""
    tool_median_s: float = Field(0.16, ge=0)
    tool_sigma: float = Field(1.3, ge=0)
    """Time a tool takes between two turns, log-normal."""
    reward_probability: float = Field(0.5, ge=0, le=1)
    """Mean chance that an episode is rewarded."""
    tasks: int | None = Field(None, ge=1)
    """Tasks that repeat; None never repeats one."""

    @model_validator(mode="after")
    def _has_path(self) -> WorkloadConfig:
        if self.source != "lognormal" and self.path is None:
            raise ValueError(f"workload.source {self.source} needs workload.path")
        return self


class SimulatorConfig(Section):
    """A planned cluster. Servers, slots, batch and staleness are those of the rest of the configuration; a server is
    one device."""

    trainer_devices: int = Field(1, ge=1)
    """Devices of the learner, whose times are `trainer`. Strategies colocated, over_sampling and tail_batching give all
    devices, the servers' and these, to generation and to training in turn."""

    engine: EngineModelConfig = EngineModelConfig()
    trainer: TrainerModelConfig = TrainerModelConfig()
    workload: WorkloadConfig = WorkloadConfig()
    strategies: list[Strategy] = Field(["synchronous", "one_step_off", "asynchronous"], min_length=1)
    dispatch: list[Literal["fifo", "sjf", "ljf", "probe"]] = Field(["fifo"], min_length=1)
    triggers: list[Literal["compute", "step", "batch"]] = Field(["compute"], min_length=1)
    known_lengths: Literal["none", "history", "oracle"] = "none"
    """What the length predictor has seen before it is asked about a task: nothing but this run; other answers to the
    same task; or the very lengths it will have, as a mean."""
    over_sampling: float = Field(1.5, gt=1)
    """Of strategy over_sampling; tail_batching starts 1.25 times the prompts."""
    segments: int = Field(4, ge=2)
    """Of strategy segments: grants that the longest answer takes."""
    steps: int = Field(20, ge=1)
    """Optimizer steps of each simulated run."""
    warmup_steps: int = Field(2, ge=0)
    """Left out of the rates."""
    makespan_groups: int | None = Field(None, ge=1)
    """Also play this many groups as one closed set, in each order of dispatch, and tell how long it takes."""
    seeds: int = Field(1, ge=1)
    """Runs of each combination, with the seeds from `seed` on."""

    @model_validator(mode="after")
    def _steady(self) -> SimulatorConfig:
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"simulator.warmup_steps ({self.warmup_steps}) leaves nothing of simulator.steps ({self.steps}) "
                "to take rates from"
            )
        return self
