"""Settings of the scheduler: order of groups, staleness of the data, and when the learner trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from penstock.config.section import Section
from penstock.config.waits import Wait, wait_time

Mode = Literal["asynchronous", "one_step_off", "synchronous", "colocated"]


class DispatchConfig(Section):
    """Order in which waiting groups start."""

    policy: Literal["fifo", "sjf", "ljf", "probe"] = "fifo"
    """`fifo`: the order of the data. `sjf`: shortest predicted answers first. `ljf`: longest predicted answers first.
    `probe`: one member of each group first; then the remaining members, those of the group with the longest probe
    first."""
    look_ahead: int | None = Field(None, ge=1)
    """Number of oldest waiting groups that the policy may choose from. None is the number of one optimizer step,
    `groups_per_step`."""
    aging: Wait = "1x"
    """Waiting time that makes up for an answer one mean length longer than the mean: a time such as `60s`, or a
    multiple such as `1x` of the mean wait of the groups that have started."""
    max_wait: Wait = "3x"
    """A group that has waited this long starts next, whatever its length: a time, or a multiple of the mean wait."""
    entropy_gain: float = Field(1.0, ge=0)
    """How strongly `sjf` prefers short answers at a higher entropy of the policy: predicted lengths count (entropy /
    reference) ** entropy_gain, with the reference of `trigger.feedback`. 0 ignores entropy."""


class LengthConfig(Section):
    """Prediction of the length of an answer before it is generated."""

    predictor: Literal["heuristic", "classifier", "history"] = "history"
    """`heuristic`: from prompt length, keywords and max_new_tokens. `classifier`: short, medium or long from text
    features, refitted as lengths arrive (needs the extra `predict`). `history`: from the measured lengths of similar
    tasks."""
    min_tau: float = Field(0.1, ge=-1, le=1)
    """Lowest rank correlation (Kendall's tau-b of predicted and real lengths) at which predictions are used. If it is
    lower by more than its standard error, the order is FIFO."""
    window: int = Field(256, ge=16)
    """Number of latest groups from which the rank correlation is computed."""
    refit_every: int = Field(256, ge=16)
    """Number of groups between two fits of the classifier."""
    max_entries: int = Field(100_000, ge=1)
    """Number of tasks the history keeps. The tasks that have not been seen for the longest time are removed first."""
    learn_from: str | None = None
    """Directory of an earlier run on the same data. The predictor learns from its lengths before the first
    prediction."""
    embedding: str = "ngrams"
    """Text embedding of the history: `ngrams` (hashed character n-grams), or `package.module:function`, a function from
    a list of texts to an array [n, d]."""


class FeedbackConfig(Section):
    """Adaptation of the trigger's thresholds N_min and T_max during training."""

    signal: Literal["none", "entropy", "time", "noise_scale"] = "none"
    """Signal that sets the thresholds. `entropy`: the policy's entropy divided by a reference. `time`: a change from
    `factor_high` at the first step to `factor_low` at the last step. `noise_scale`: the gradient noise scale is used as
    the number of samples."""
    reference: Literal["initial", "running"] | Annotated[float, Field(gt=0)] = "initial"
    """Reference of the entropy. `initial`: the mean entropy of the first `reference_steps` steps. `running`: an
    exponential average over about `reference_steps` steps; it follows a slow fall of the entropy, and hides it. A
    number: that entropy, in nats per token."""
    reference_steps: int | None = Field(None, ge=1)
    """Number of steps in the reference, and in the averages of `noise_scale`. None is 10 for the reference `initial`,
    and 50 otherwise."""
    form: Literal["levels", "smooth"] = "levels"
    """How the factor follows from entropy. `levels`: `factor_high` while entropy is high, 1 while it is normal,
    `factor_low` while it is low. `smooth`: the factor goes geometrically from `factor_high` at the reference to
    `factor_low` at `low_below` times the reference."""
    normal_below: float | None = Field(None, gt=0)
    """Entropy is high until it falls below this many times its reference. None is 0.7, or 1.1 for the reference
    `running`."""
    low_below: float | None = Field(None, gt=0)
    """Entropy is low below this many times its reference. None is 0.35, or 0.9 for the reference `running`."""
    factor_high: float = Field(0.5, gt=0, le=1)
    """Factor on N_min and T_max while entropy is high: with 0.5, 32 samples become 16 and 500 ms become 250."""
    factor_low: float = Field(2.0, ge=1)
    """Factor on N_min and T_max while entropy is low: with 2, 32 samples become 64 and 500 ms become 1000."""
    band: float = Field(0.1, gt=0, lt=1)
    """Hysteresis. An entropy that rises again must exceed a threshold by this share before its level changes. A
    gradient noise scale must differ by this share from N_min before N_min changes."""
    hold_steps: int = Field(2, ge=0)
    """Steps after a change during which the thresholds stay as they are."""
    fewest_samples: int = Field(1, ge=1)
    most_samples: int | None = Field(None, ge=1)
    """Upper bound of N_min; `fewest_samples` is its lower bound. None is the number of samples of a whole step."""
    shortest_wait: Wait = "50ms"
    longest_wait: Wait = "1x"
    """Upper bound of T_max; `shortest_wait` is its lower bound. Times, or multiples as in `trigger.max_wait`."""

    @property
    def averaged_steps(self) -> int:
        """Return the number of steps in the reference of the entropy, and in averages of the noise scale."""
        starts = self.reference == "initial" and self.signal != "noise_scale"
        return self.reference_steps or (10 if starts else 50)

    @property
    def levels(self) -> tuple[float, float]:
        """Return the ratios of entropy to its reference below which entropy is normal, and low."""
        normal, low = (1.1, 0.9) if self.reference == "running" else (0.7, 0.35)
        return self.normal_below or normal, self.low_below or low

    def contradictions(self) -> Iterator[str]:
        normal, low = self.levels
        if low >= normal:
            yield f"low_below ({low}) is not below normal_below ({normal})"
        if self.form == "smooth" and low >= 1:
            yield f"form smooth needs low_below under 1, where the factor is factor_high (it is {low})"
        if self.most_samples is not None and self.fewest_samples > self.most_samples:
            yield f"fewest_samples ({self.fewest_samples}) exceeds most_samples ({self.most_samples})"
        shortest, longest = wait_time(self.shortest_wait), wait_time(self.longest_wait)
        if shortest.is_relative == longest.is_relative and shortest.number > longest.number:
            yield f"shortest_wait ({self.shortest_wait}) exceeds longest_wait ({self.longest_wait})"


MIN_SAMPLES = 64


class TriggerConfig(Section):
    """Conditions under which the learner gets groups to train."""

    use: Literal["compute", "step", "batch"] = "compute"
    """`compute`: accumulate gradients as groups become ready; take an optimizer step at a stable batch size. `step`:
    every trigger is an optimizer step. `batch`: wait for all groups of a step (the fixed-batch baseline)."""
    min_samples: int | None = Field(None, ge=1)
    """N_min: number of ready samples that starts training, rounded up to whole groups. If unset, the run finds it: the
    smallest number at which the learner reaches 90 % of its highest rate, by its own timings. With several ranks it
    is at least 4 for each rank. With `use: step` it is also at least so many that no version follows another before the
    servers, with `max_staleness`, can use it. Until the first timings it is 64."""
    max_wait: Wait | None = None
    """T_max: once the learner has waited this long with at least one group ready, it trains the groups that are ready.
    A time such as `500ms`, or a multiple such as `0.25x` of the time in which the run makes a whole step's groups. If
    unset, it is `0.25x`, and `1x` with `use: step`."""
    feedback: FeedbackConfig = FeedbackConfig()

    def contradictions(self) -> Iterator[str]:
        adapts = self.feedback.signal != "none"
        if adapts and self.use == "batch":
            yield (
                f"feedback.signal {self.feedback.signal} moves N_min and T_max, which use batch does not have: "
                "set use to compute or step, or the signal to none"
            )
        if adapts and self.samples_of(MIN_SAMPLES) < self.feedback.fewest_samples:
            fewest = f"feedback.fewest_samples ({self.feedback.fewest_samples})"
            yield f"min_samples ({self.samples_of(MIN_SAMPLES)}) is below {fewest}"

    def samples_of(self, step: int) -> int:
        """Return N_min before anything is measured, if a step has `step` samples."""
        return self.min_samples or min(MIN_SAMPLES, step)

    @property
    def wait(self) -> str:
        """Return T_max as a setting."""
        return self.max_wait or ("1x" if self.use == "step" else "0.25x")


class GroupFilterConfig(Section):
    """A filter that drops groups before training."""

    name: str
    """Name of the filter: `zero_variance`, `over_long`, `stop_reason`, `score_range`, or `package.module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the filter."""


class EarlyStopConfig(Section):
    """When training ends because nothing more is learnt. The run then saves, evaluates and completes, as after its last
    step."""

    filtered_share: float = Field(0.95, gt=0, le=1)
    """Training ends when at least this share of the latest `groups` groups was filtered."""
    groups: int = Field(4000, ge=1)
    min_entropy: float = Field(0.01, ge=0)
    """Training ends when the policy's entropy was below this value in each of the latest `steps` steps, in nats per
    token."""
    steps: int = Field(50, ge=1)


Tunable = Literal[
    "redundancy",
    "max_running",
    "dispatch",
    "max_staleness",
    "segment_length",
    "min_samples",
    "max_wait",
    "look_ahead",
    "entropy_gain",
]
"""A setting that the run may change by itself, those with the largest effect first; `config/tunable.py` has its full
name."""


class TuningConfig(Section):
    """Self-tuning: the run measures itself, searches better settings on a model of itself, and changes them."""

    mode: Literal["off", "auto"] = "off"
    """`auto`: settings change while the run trains. `scheduler.tuning: auto` is short for `{mode: auto}`."""
    may: list[Tunable] | None = Field(None, min_length=1)
    """The settings that may change. None is all that can change in this run. A setting never leaves the bounds that the
    configuration sets: `max_staleness` only falls, and rises again to its configured value."""
    min_gain: float = Field(0.05, gt=0, le=1)
    """Smallest predicted gain in samples per second, as a share, for which settings change."""
    first_steps: int = Field(8, ge=4)
    """Optimizer steps before the first search, and before the effect of a change is judged."""
    every_steps: int = Field(100, ge=1)
    """Optimizer steps between two searches, while the workload does not drift."""
    drift: float = Field(0.2, gt=0)
    """A new search begins when the mean length of answers, the time of environments or the rate has changed by this
    share since the last search."""
    max_cpu_share: float = Field(0.02, gt=0, le=1)
    """Bound on the processor time of all searches, as a share of the run's."""
    min_sample_efficiency: float = Field(0.5, ge=0, le=1)
    """While the effective sample size of the importance weights is below this share of the samples, no change may make
    samples older."""


class SchedulerConfig(Section):
    """Admission, order, segments, training trigger and group filters."""

    mode: Mode = "asynchronous"
    """`asynchronous`: generation and training overlap, as far as `max_staleness` allows. `one_step_off`: the servers
    generate the next batch while the learner trains the last one. `synchronous`: generation and training alternate.
    `colocated`: they alternate on the same devices or cores; each gives the device's memory back for the other. All
    modes but `asynchronous` train whole batches, as `trigger.use` batch does."""
    max_staleness: int = Field(2, ge=0)
    """Largest staleness in policy versions. It bounds the groups that may start; older tokens are masked out of the
    loss. 0 is on-policy."""
    max_running: int | None = Field(None, ge=1)
    """Number of episodes that may generate at once. None is twice the servers' slots, so that slots never wait for a
    group's slowest member."""
    over_sampling: float = Field(1.0, ge=1)
    """Mode colocated: number of groups started per group trained. Groups that are unfinished when a batch is complete
    wait for the next round."""
    leftovers: Literal["resume", "restart"] = "resume"
    """Treatment of groups that over-sampling leaves unfinished. `resume`: they continue first in the next round, from
    their last token (as in APRIL, arXiv 2509.18521). `restart`: they start again in a later round that has only such
    groups (as in RollPacker, arXiv 2509.21009)."""
    segment_length: int | None = Field(None, ge=1)
    """Tokens per grant. A longer answer is cut and continues with its next grant. None lets a turn finish in one
    grant."""
    max_segment_count: int | None = Field(None, ge=1)
    """Maximum number of segments per answer; an answer that needs more is truncated. None sets no bound."""
    global_max_length: int | None = Field(None, ge=1)
    """Maximum number of tokens of an episode over all its turns and segments; an episode that reaches it is truncated.
    None leaves the bound env.max_turns * env.max_new_tokens."""
    group_filter: list[GroupFilterConfig] = Field([GroupFilterConfig(name="zero_variance")])
    """Filters that a group must pass to be trained: a name, {name, options}, or a list of these. The filters run in
    order, and the first filter that drops a group decides. [] trains all groups. `zero_variance` drops groups with all
    rewards equal, because their advantages are zero."""
    max_filtered_in_a_row: int = Field(1000, ge=1)
    """After this many consecutive filtered groups there is nothing to learn. Training ends early (`early_stop`). The
    run fails if it has trained nothing yet, or if `early_stop` is None."""
    early_stop: EarlyStopConfig | None = EarlyStopConfig()
    """When training ends before its last step, because nothing more is learnt. None trains to the last step."""
    dispatch: DispatchConfig = DispatchConfig()
    length: LengthConfig = LengthConfig()
    trigger: TriggerConfig = TriggerConfig()
    tuning: TuningConfig = TuningConfig()

    @property
    def trigger_use(self) -> Literal["compute", "step", "batch"]:
        """Return the trigger in use. Only asynchronous training may take less than a whole batch."""
        return self.trigger.use if self.mode == "asynchronous" else "batch"

    @property
    def drops_equal_rewards(self) -> bool:
        """Return whether the filters drop groups with all rewards equal."""
        return any(each.name == "zero_variance" for each in self.group_filter)

    @property
    def has_own_filter(self) -> bool:
        """Return whether a filter of the user decides about groups."""
        return any(":" in each.name for each in self.group_filter)

    @property
    def alternates(self) -> bool:
        """Return whether generation stops while the learner trains."""
        return self.mode in ("synchronous", "colocated")

    @field_validator("group_filter", mode="before")
    @classmethod
    def _each_named(cls, given: Any) -> Any:
        several = given if isinstance(given, list) else [given]
        return [{"name": each} if isinstance(each, str) else each for each in several]

    @field_validator("tuning", mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        return {"mode": given} if isinstance(given, str) else given

    def why_fixed(self, name: Tunable) -> str | None:
        """Return why a setting cannot change by itself in this run; None if it can."""
        if name in ("min_samples", "max_wait") and self.trigger_use != "compute":
            is_step = self.trigger_use == "step"
            return (
                "with trigger.use step, it is the size of an optimizer step"
                if is_step
                else "the run trains whole batches"
            )
        if name == "min_samples" and self.trigger.feedback.signal == "noise_scale":
            return "trigger.feedback.signal noise_scale sets it"
        if name == "segment_length" and self.max_segment_count is not None:
            return "with max_segment_count, it decides which answers are truncated"
        if name == "max_staleness" and (self.mode != "asynchronous" or self.max_staleness < 2):
            return f"mode {self.mode} with max_staleness {self.max_staleness} has only this value"
        return None

    def contradictions(self) -> Iterator[str]:
        for name in self.tuning.may or ():
            if reason := self.why_fixed(name):
                yield f"tuning.may names {name}, which cannot change by itself: {reason}"
        if self.alternates and self.over_sampling == 1 and self.max_staleness > 0:
            also = ", or over_sampling above 1" if self.mode == "colocated" else ""
            yield f"mode {self.mode} is on-policy: set max_staleness to 0 (it is {self.max_staleness}){also}"
        if self.mode == "one_step_off" and self.max_staleness < 1:
            yield "mode one_step_off trains the samples of the previous version: set max_staleness to 1 or more"
        if self.over_sampling > 1 and self.mode != "colocated":
            yield f"over_sampling belongs to mode colocated, not to {self.mode}"
        if self.over_sampling > 1 and self.leftovers == "resume" and self.max_staleness < 1:
            yield (
                "over_sampling with leftovers resume carries answers over an update: set max_staleness to 1 or more, "
                "or leftovers to restart"
            )
        if self.mode != "asynchronous" and self.trigger.use == "step":
            yield f"trigger.use step belongs to mode asynchronous: {self.mode} trains whole batches"
        if self.max_segment_count is not None and self.segment_length is None:
            yield "max_segment_count has no effect without segment_length: set both, or neither"
        names = [each.name for each in self.group_filter]
        if len(set(names)) != len(names):
            yield f"group_filter names a filter twice: {', '.join(names)}"
        length, whole = self.segment_length, self.global_max_length
        if length is not None and whole is not None and length > whole:
            yield f"segment_length ({length}) is longer than global_max_length ({whole})"
