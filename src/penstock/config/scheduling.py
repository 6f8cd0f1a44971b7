"""Settings of the scheduler: what runs next, how old data may be, when the learner gets work."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.config.section import Section

Mode = Literal["asynchronous", "one_step_off", "synchronous", "colocated"]


class DispatchConfig(Section):
    """In which order waiting groups run."""

    policy: Literal["fifo", "sjf", "ljf", "probe"] = "fifo"
    """`fifo`: in the order of the data. `sjf`: shortest predicted answers first. `ljf`: longest first. `probe`: one
    member of each group first; then the rest of the groups, longest probe first."""
    look_ahead: int | None = Field(None, ge=1)
    """Groups the policy may choose among: the oldest ones. None is one optimizer step's worth, `groups_per_step`."""
    aging_s: float = Field(60.0, gt=0)
    """Waiting this long makes up for an answer longer than the mean by one mean length."""
    max_wait_s: float = Field(600.0, gt=0)
    """A group that has waited this long runs next, whatever its length."""
    entropy_gain: float = Field(1.0, ge=0)
    """How much more `sjf` prefers short answers when the policy's entropy is above its running reference: predicted
    lengths count (entropy / reference) ** entropy_gain. 0 ignores entropy."""


class LengthConfig(Section):
    """How the length of an answer is predicted before it is generated."""

    predictor: Literal["heuristic", "classifier", "history"] = "history"
    """`heuristic`: prompt length, keywords, max_new_tokens. `classifier`: short, medium or long from text features,
    refitted as lengths arrive (needs the extra `predict`). `history`: what similar tasks took."""
    min_tau: float = Field(0.1, ge=-1, le=1)
    """Below this rank correlation (Kendall's tau-b of predicted and real lengths) the order is FIFO."""
    window: int = Field(256, ge=16)
    """Latest groups the rank correlation is taken over."""
    refit_every: int = Field(256, ge=16)
    """Groups between two fits of the classifier."""
    max_entries: int = Field(100_000, ge=1)
    """Tasks the history remembers; the longest unseen go first."""
    learn_from: str | None = None
    """Directory of an earlier run on the same data, whose lengths are learnt before the first prediction."""
    embedding: str = "ngrams"
    """Of the history: `ngrams` (hashed character n-grams), or `package.module:function`, from a list of texts to an
    array [n, d]."""


class FeedbackConfig(Section):
    """What moves the trigger's thresholds as training goes on."""

    signal: Literal["none", "entropy", "time", "noise_scale"] = "none"
    """`entropy`: the policy's entropy against its running reference. `time`: from `factor_high` at the first step to
    `factor_low` at the last. `noise_scale`: the gradient noise scale as the number of samples."""
    factor_high: float = Field(0.5, gt=0, le=1)
    """Of N_min and T_max while entropy is high: 32 samples become 16, 500 ms become 250."""
    factor_low: float = Field(2.0, ge=1)
    """Of N_min and T_max while entropy is low: 32 samples become 64, 500 ms become 1000."""
    band: float = Field(0.1, gt=0, lt=1)
    """Entropy is high above (1 + band) times its reference, low below (1 - band) times it; it is normal again once it
    has come back half of the way (hysteresis)."""
    reference_steps: int = Field(50, ge=1)
    """The reference is an exponential average over about this many steps."""
    hold_steps: int = Field(2, ge=0)
    """Steps after a change during which there is no other."""
    fewest_samples: int = Field(1, ge=1)
    most_samples: int | None = Field(None, ge=1)
    """N_min stays within these; None is the samples of a whole step."""
    shortest_wait_s: float = Field(0.05, gt=0)
    longest_wait_s: float = Field(60.0, gt=0)
    """T_max stays within these."""

    @model_validator(mode="after")
    def _ordered(self) -> FeedbackConfig:
        if self.most_samples is not None and self.fewest_samples > self.most_samples:
            raise ValueError(f"fewest_samples ({self.fewest_samples}) exceeds most_samples ({self.most_samples})")
        if self.shortest_wait_s > self.longest_wait_s:
            raise ValueError(f"shortest_wait_s ({self.shortest_wait_s}) exceeds longest_wait_s ({self.longest_wait_s})")
        return self


MIN_SAMPLES = 64


class TriggerConfig(Section):
    """When the learner gets work."""

    use: Literal["compute", "step", "batch"] = "compute"
    """`compute`: accumulate gradients as groups become ready, step at a stable batch size. `step`: every trigger is a
    step. `batch`: wait for a whole step's groups (the fixed-batch baseline)."""
    min_samples: int | None = Field(None, ge=1)
    """N_min, rounded up to whole groups; 64 if unset, or the samples of a step where those are fewer."""
    max_wait_s: float = Field(0.5, gt=0)
    """T_max: go on with what is ready (at least one group) after this long."""
    feedback: FeedbackConfig = FeedbackConfig()

    @model_validator(mode="after")
    def _consistent(self) -> TriggerConfig:
        adapts = self.feedback.signal != "none"
        if adapts and self.use == "batch":
            raise ValueError(
                f"feedback.signal {self.feedback.signal} moves N_min and T_max, which use batch does not have: "
                "set use to compute or step, or the signal to none"
            )
        if adapts and self.samples_of(MIN_SAMPLES) < self.feedback.fewest_samples:
            raise ValueError(
                f"min_samples ({self.samples_of(MIN_SAMPLES)}) is below feedback.fewest_samples "
                f"({self.feedback.fewest_samples})"
            )
        return self

    def samples_of(self, step: int) -> int:
        """N_min where a step has so many samples."""
        return self.min_samples or min(MIN_SAMPLES, step)


class GroupFilterConfig(Section):
    """Which groups are not worth training."""

    name: str
    """`zero_variance`, `over_long`, `stop_reason`, `score_range`, or `package.module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the filter."""


class SchedulerConfig(Section):
    """Admission, order, segments, trigger, filters."""

    mode: Mode = "asynchronous"
    """`asynchronous`: generation and training overlap, as far as `max_staleness` allows. `one_step_off`: the next batch
    is generated while the last one is trained. `synchronous`: they alternate. `colocated`: they alternate on the same
    device or cores, all of them in turn; each gives the device's memory back for the other's turn. All but
    `asynchronous` train whole batches, as `trigger.use` batch does."""
    max_staleness: int = Field(2, ge=0)
    """Versions. Bounds what is started; tokens older than this are masked out of the loss. 0 is on-policy."""
    max_running: int | None = Field(None, ge=1)
    """Episodes that may be generating at once; None is twice the servers' slots, so that slots never wait for a
    group's slowest member."""
    over_sampling: float = Field(1.0, ge=1)
    """Mode colocated: groups started per group trained. What is unfinished when a batch is whole waits for the next
    round."""
    leftovers: Literal["resume", "restart"] = "resume"
    """What over-sampling leaves unfinished. `resume`: goes on first, from where it was cut (as in APRIL, arXiv
    2509.18521). `restart`: starts again in a later round of leftovers alone (as in RollPacker, arXiv 2509.21009)."""
    segment_length: int | None = Field(None, ge=1)
    """Tokens per grant; a longer answer is cut and goes on with its next grant. None lets a turn finish in one."""
    max_segment_count: int | None = Field(None, ge=1)
    """Segments per answer; one that needs more is truncated. None does not bound them."""
    global_max_length: int | None = Field(None, ge=1)
    """Tokens an episode may generate over all its turns and segments; what reaches it is truncated. None leaves
    env.max_turns * env.max_new_tokens."""
    group_filter: list[GroupFilterConfig] = Field([GroupFilterConfig(name="zero_variance")])
    """Filters that whole groups must pass to be trained: a name, {name, options}, or a list of these, of which the
    first to drop a group decides. [] trains all. `zero_variance`: drops groups whose rewards are all equal, since their
    advantages are zero."""
    max_filtered_in_a_row: int = Field(1000, ge=1)
    """This many filtered groups without a trainable one in between end training: there is nothing to learn."""
    dispatch: DispatchConfig = DispatchConfig()
    length: LengthConfig = LengthConfig()
    trigger: TriggerConfig = TriggerConfig()

    @property
    def trigger_use(self) -> Literal["compute", "step", "batch"]:
        """Only asynchronous training takes less than a whole batch at a time."""
        return self.trigger.use if self.mode == "asynchronous" else "batch"

    @property
    def drops_equal_rewards(self) -> bool:
        """Groups whose rewards are all equal are not trained."""
        return any(each.name == "zero_variance" for each in self.group_filter)

    @property
    def alternates(self) -> bool:
        """Generation stands still while the learner trains."""
        return self.mode in ("synchronous", "colocated")

    @field_validator("group_filter", mode="before")
    @classmethod
    def _each_named(cls, given: Any) -> Any:
        several = given if isinstance(given, list) else [given]
        return [{"name": each} if isinstance(each, str) else each for each in several]

    @model_validator(mode="after")
    def _consistent(self) -> SchedulerConfig:
        if self.alternates and self.over_sampling == 1 and self.max_staleness > 0:
            raise ValueError(
                f"mode {self.mode} is on-policy: set max_staleness to 0 (it is {self.max_staleness})"
                + (", or over_sampling above 1" if self.mode == "colocated" else "")
            )
        if self.mode == "one_step_off" and self.max_staleness < 1:
            raise ValueError("mode one_step_off trains what the version before made: set max_staleness to 1 or more")
        if self.over_sampling > 1 and self.mode != "colocated":
            raise ValueError(f"over_sampling belongs to mode colocated, not to {self.mode}")
        if self.over_sampling > 1 and self.leftovers == "resume" and self.max_staleness < 1:
            raise ValueError(
                "over_sampling with leftovers resume carries answers over an update: set max_staleness to 1 or more, "
                "or leftovers to restart"
            )
        if self.mode != "asynchronous" and self.trigger.use == "step":
            raise ValueError(f"trigger.use step belongs to mode asynchronous: {self.mode} trains whole batches")
        if self.max_segment_count is not None and self.segment_length is None:
            raise ValueError("max_segment_count means nothing without segment_length: set both, or neither")
        names = [each.name for each in self.group_filter]
        if len(set(names)) != len(names):
            raise ValueError(f"group_filter names a filter twice: {', '.join(names)}")
        length, whole = self.segment_length, self.global_max_length
        if length is not None and whole is not None and length > whole:
            raise ValueError(f"segment_length ({length}) is longer than global_max_length ({whole})")
        return self
