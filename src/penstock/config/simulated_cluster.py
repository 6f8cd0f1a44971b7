"""Settings of `penstock simulate`: the modelled machines and their workload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from penstock.config.section import Section

OnAllDevices = Literal["colocated", "over_sampling", "tail_batching"]
"""Strategies that generate on all devices and train on all devices, in turn."""
Strategy = Literal["configured", "synchronous", "one_step_off", "asynchronous", "segments", OnAllDevices]
"""Strategies to compare. `configured` is the scheduler section as it stands. The other strategies take the settings
that they leave open from that section."""


class EngineModelConfig(Section):
    """Timing and memory of a modelled rollout server."""

    step_s: float = Field(0.012, gt=0)
    """Seconds of one decode step (one token for every active sequence), independent of the number of sequences."""
    sequence_s: float = Field(0.0002, ge=0)
    """Seconds that each active sequence adds to a decode step."""
    context_token_s: float = Field(0.0, ge=0)
    """Seconds that each token held by the active sequences adds to a decode step: its keys and values are read."""
    prefill_token_s: float = Field(5e-6, ge=0)
    """Seconds for each token of a prompt that enters, and for each token of a context that continues in another grant.
    Every generate call computes its whole context. Members of a group that enter together share it."""
    admit_share: float = Field(0.0, ge=0, le=1)
    """Share of the slots that must be free before answers to the first prompt in the queue enter, unless fewer answers
    to that prompt remain. 0 fills every slot at once. Penstock's own engine waits for an eighth, so that it computes
    prompts rarely."""
    admit_tokens: int | None = Field(None, ge=1)
    """Maximum number of prompt tokens that enter in one step, unless a single prompt is longer. None is no limit.
    Penstock's own engine uses 4096."""
    kv_tokens: int | None = Field(None, ge=1)
    """Memory of a server in tokens: all active sequences must fit at their final length. None is no limit."""
    update_s: float = Field(1.0, ge=0)
    """Seconds that a weight update pauses a server."""
    latency_s: float = Field(0.0, ge=0)
    """Seconds per grant for the way from the scheduler's decision to the server and back, in total."""


class TrainerModelConfig(Section):
    """Timing of the modelled learner."""

    token_s: float = Field(2e-6, ge=0)
    """Seconds per trained token, prompt tokens included."""
    call_s: float = Field(0.0, ge=0)
    """Seconds per call of accumulate."""
    step_s: float = Field(1.0, ge=0)
    """Seconds per optimizer step."""
    publish_s: float = Field(0.0, ge=0)
    """Seconds for writing the weights where servers can read them, beside training."""


class WorkloadConfig(Section):
    """Lengths of the simulated answers."""

    source: Literal["lognormal", "trace", "run"] = "lognormal"
    """Source of the lengths. `lognormal`: a hierarchical model. `trace`: a file. `run`: the episodes of a Penstock
    run."""
    path: str | None = None
    """Path of the trace (.jsonl, .csv or .parquet with columns task_id and response_tokens, and optionally
    prompt_tokens, turn, tool_s and reward_s), or the run's directory."""
    median_tokens: float = Field(4000.0, gt=0)
    between_sigma: float = Field(0.77, ge=0)
    """Standard deviation of log length between prompts (reasoning models .77, base models .22)."""
    within_sigma: float = Field(0.23, ge=0)
    """Standard deviation of log length between the answers to one prompt (reasoning models .23, base models .90)."""
    runaway_share: float = Field(0.0, ge=0, le=1)
    """Share of answers that reach the cap, whatever length was drawn for them."""
    max_tokens: int = Field(16_000, ge=1)
    """Maximum number of tokens of an answer, over all turns."""
    prompt_tokens: int = Field(512, ge=0)
    turns: int = Field(1, ge=1)
    """Maximum number of turns of an episode. The number is uniform between one and this."""
    tool_median_s: float = Field(0.16, ge=0)
    tool_sigma: float = Field(1.3, ge=0)
    """Standard deviation of log tool time; `tool_median_s` is the median. A tool runs between two turns; its time is
    log-normal."""
    reward_median_s: float = Field(0.0, ge=0)
    reward_sigma: float = Field(0.5, ge=0)
    """Standard deviation of log reward time; `reward_median_s` is the median, and 0 is no time. The reward is computed
    after the last token of an episode, while other episodes generate."""
    reward_probability: float = Field(0.5, ge=0, le=1)
    """Mean probability that an episode is rewarded."""
    tasks: int | None = Field(None, ge=1)
    """Number of different tasks, which repeat; None never repeats a task."""

    def contradictions(self) -> Iterator[str]:
        if self.source != "lognormal" and self.path is None:
            yield f"workload.source {self.source} needs workload.path"


class SimulatorConfig(Section):
    """A planned cluster. The numbers of servers and slots, the batch size and the staleness come from the other
    sections; a server is one device."""

    trainer_devices: int = Field(1, ge=1)
    """Number of devices of the learner; `trainer` has the times on these devices. Strategies colocated, over_sampling
    and tail_batching use all devices, those of the servers and of the learner, for generation and training in turn."""

    engine: EngineModelConfig = EngineModelConfig()
    trainer: TrainerModelConfig = TrainerModelConfig()
    workload: WorkloadConfig = WorkloadConfig()
    strategies: list[Strategy] = Field(["synchronous", "one_step_off", "asynchronous"], min_length=1)
    dispatch: list[Literal["fifo", "sjf", "ljf", "probe"]] = Field(["fifo"], min_length=1)
    triggers: list[Literal["compute", "step", "batch"]] = Field(["compute"], min_length=1)
    known_lengths: Literal["none", "history", "oracle"] = "none"
    """Knowledge of the length predictor about a task: `none`: only the lengths of this run. `history`: lengths of other
    answers to the same task. `oracle`: the true lengths of the group, as a mean."""
    over_sampling: float = Field(1.5, gt=1)
    """Groups started per group trained in strategy over_sampling; tail_batching starts 1.25 times the prompts."""
    segments: int = Field(4, ge=2)
    """Strategy segments: number of grants that the longest answer takes."""
    steps: int = Field(20, ge=1)
    """Optimizer steps of each simulated run."""
    warmup_steps: int = Field(2, ge=0)
    """First steps that the rates leave out."""
    makespan_groups: int | None = Field(None, ge=1)
    """Also run this many groups as one closed set, in each order of dispatch, and report how long it takes."""
    seeds: int = Field(1, ge=1)
    """Number of runs of each combination, with consecutive seeds starting at `seed`."""

    def contradictions(self) -> Iterator[str]:
        if self.warmup_steps >= self.steps:
            yield (
                f"simulator.warmup_steps ({self.warmup_steps}) leaves nothing of simulator.steps ({self.steps}) "
                "to take rates from"
            )
