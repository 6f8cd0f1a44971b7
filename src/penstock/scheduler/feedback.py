"""Feedback: a signal moves the trigger's thresholds during training.

The signal is the policy's entropy, time, or the gradient noise scale. After each optimizer step it gives the factor
by which it wants to multiply N_min and T_max. The trigger clamps the results. After a change, the factor stays for
`hold_steps` steps, so that the change first takes effect. Under every signal, entropy decides how strongly `sjf`
prefers short answers.

Raw entropy shifts with temperature, answer length and task mix, so only its ratio to a reference is informative. It
falls almost monotonically, most of it early in training (arXiv 2505.22617). The reference is the entropy of the first
steps. So a run starts at the level `high`, with small and frequent steps, and ends at `low`, with large and rare ones.
A running average as the reference would call every decaying entropy low.

The entropy signal is the rule of the design note. It must be compared with the schedule over time and with the noise
scale (arXiv 1812.06162).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.config.scheduling import FeedbackConfig
from penstock.scheduler.running_mean import RunningMean
from penstock.types import LearnerState

FLOOR = 1e-3
"""Nats per token. Entropies below it count as equal, so that a nearly deterministic policy does not look volatile."""
SMOOTHING = 4
"""Entropy is averaged over this many times the steps for which a setting stays."""
WEAKEST, STRONGEST = 0.25, 4.0
"""Bounds of `preference`."""


class Reference(msgspec.Struct):
    """The entropy in nats per token that counts as 1, and the ratio of the policy's entropy to it."""

    mean: RunningMean = msgspec.field(default_factory=RunningMean)
    """Mean entropy of the first steps, or a running average of it."""
    latest: RunningMean = msgspec.field(default_factory=RunningMean)
    """Mean over several times as many steps as a setting stays, so that the noise of steps changes no setting."""
    ratio: float = 1.0
    """Latest ratio of entropy to the reference."""

    def observe(self, entropy: float, config: FeedbackConfig) -> None:
        """Compute the ratio of `entropy` to the reference, and update the reference.

        A negative or infinite entropy, or NaN, changes nothing.
        """
        if not math.isfinite(entropy) or entropy < 0:
            return
        self.latest.add(entropy, steps=SMOOTHING * config.hold_steps + 1)
        if config.reference == "initial" and self.mean.count < config.averaged_steps:
            self.mean.add(entropy, steps=config.averaged_steps)
        if value := self.value(config):
            self.ratio = max(self.latest.value, FLOOR) / max(value, FLOOR)
        if config.reference == "running":
            self.mean.add(entropy, steps=config.averaged_steps)

    def value(self, config: FeedbackConfig) -> float | None:
        """Return the reference; None before the first step."""
        if isinstance(config.reference, float):
            return config.reference
        return self.mean.value if self.mean.count else None


def preference(ratio: float, gain: float) -> float:
    """Return ratio ** gain, clamped to [0.25, 4]. `sjf` weighs predicted lengths by it: more at a higher entropy."""
    if ratio <= 0:
        return WEAKEST if gain > 0 else 1.0
    exponent = gain * math.log(ratio)  # in logarithms: a power of two large numbers overflows
    limit = math.log(STRONGEST)
    return min(max(math.exp(min(max(exponent, -limit), limit)), WEAKEST), STRONGEST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """The settings that hold until the next optimizer step."""

    factor: float
    """Multiplies N_min and T_max."""
    preference: float
    """How strongly `sjf` counts predicted lengths."""
    reason: str
    inputs: dict[str, float]


Level = Literal["low", "normal", "high"]


class Setting(NamedTuple):
    """The factor of the thresholds that a signal wants, and the level of the entropy behind it."""

    level: Level
    factor: float


NORMAL = Setting("normal", 1.0)


class NoState(msgspec.Struct):
    """The state of a signal without memory."""


class Signal:
    """A rule for the thresholds. This one keeps the configured thresholds."""

    state: msgspec.Struct = NoState()
    """The state that a resumed run needs."""
    initial: Setting = NORMAL
    """The setting before the first optimizer step."""

    def wanted(self, current: Setting, ratio: float, metrics: Mapping[str, float]) -> tuple[Setting, str]:
        """Return the setting after one more optimizer step, and why. Entropy is `ratio` times its reference."""
        return NORMAL, "thresholds are fixed"


class EntropyLevel(Signal):
    """Three levels of entropy, or a smooth factor.

    A level changes at once when entropy falls below a threshold. When entropy rises, it must exceed the threshold by
    `band`.
    """

    def __init__(self, config: FeedbackConfig) -> None:
        self._config = config
        self._factors: dict[Level, float] = {"high": config.factor_high, "normal": 1.0, "low": config.factor_low}
        self.initial = self._setting(1.0, "normal")

    def wanted(self, current: Setting, ratio: float, metrics: Mapping[str, float]) -> tuple[Setting, str]:
        setting = self._setting(ratio, current.level)
        return setting, f"entropy is {setting.level}: {ratio:.3f} times its reference"

    def _setting(self, ratio: float, current: Level) -> Setting:
        normal, low = self._config.levels
        rise = 1 + self._config.band
        level: Level = "normal"
        if ratio >= normal * (1.0 if current == "high" else rise):
            level = "high"
        elif ratio < low * (rise if current == "low" else 1.0):
            level = "low"
        return Setting(level, self._factors[level] if self._config.form == "levels" else self._smooth(ratio, low))

    def _smooth(self, ratio: float, low: float) -> float:
        share = min(max((ratio - low) / (1 - low), 0.0), 1.0)
        factor: float = self._config.factor_high**share * self._config.factor_low ** (1 - share)
        return factor


class StepCount(msgspec.Struct):
    num_steps: int = 0


class Schedule(Signal):
    """A geometric schedule from `factor_high` at the first step to `factor_low` at the last.

    The factor is constant over each hold_steps + 1 steps.
    """

    state: StepCount

    def __init__(self, config: FeedbackConfig, *, total_steps: int) -> None:
        self._config, self._total, self.state = config, total_steps, StepCount()
        self.initial = self._at(0)

    def wanted(self, current: Setting, ratio: float, metrics: Mapping[str, float]) -> tuple[Setting, str]:
        self.state.num_steps += 1
        setting = self._at(self.state.num_steps)
        return setting, f"{self.state.num_steps} of {self._total} steps are done: factor {setting.factor:.3g}"

    def _at(self, steps_done: int) -> Setting:
        stride = self._config.hold_steps + 1
        last = (self._total - 1) // stride
        share = min(steps_done // stride / last, 1.0) if last else 0.0
        return Setting("normal", self._config.factor_high ** (1 - share) * self._config.factor_low**share)


class NoiseAverages(msgspec.Struct):
    trace: RunningMean = msgspec.field(default_factory=RunningMean)
    signal: RunningMean = msgspec.field(default_factory=RunningMean)


class NoiseScale(Signal):
    """Sets N_min to the gradient noise scale B_simple = tr(S) / |G|^2 (arXiv 1812.06162).

    N_min changes only if the scale leaves a band around the current N_min. Numerator and denominator have separate
    averages, since the ratio of two noisy numbers is biased. While an average is not positive, noise still dominates,
    and N_min does not change.
    """

    state: NoiseAverages

    def __init__(self, config: FeedbackConfig, *, min_samples: int) -> None:
        self._config, self._min_samples, self.state = config, min_samples, NoiseAverages()

    def wanted(self, current: Setting, ratio: float, metrics: Mapping[str, float]) -> tuple[Setting, str]:
        trace, signal = metrics.get("noise_trace", math.nan), metrics.get("noise_signal", math.nan)
        if math.isfinite(trace) and math.isfinite(signal):
            self.state.trace.add(trace, steps=self._config.averaged_steps)
            self.state.signal.add(signal, steps=self._config.averaged_steps)
        if self.state.trace.value <= 0 or self.state.signal.value <= 0:
            return current, "no gradient noise scale yet"
        samples = self.state.trace.value / self.state.signal.value
        factor = samples / self._min_samples
        if not math.isfinite(factor) or factor <= 0 or abs(factor / current.factor - 1) <= self._config.band:
            return current, f"gradient noise scale {samples:.4g} samples: within the band"
        return Setting("normal", factor), f"gradient noise scale {samples:.4g} samples: {factor:.3g} times N_min"


class Feedback:
    """A signal, the hold after each change, and the `sjf` preference that follows from entropy."""

    def __init__(self, config: FeedbackConfig, *, entropy_gain: float, total_steps: int, min_samples: int) -> None:
        """The factors multiply `min_samples` (N_min)."""
        self._signal = Signal()
        match config.signal:
            case "entropy":
                self._signal = EntropyLevel(config)
            case "time":
                self._signal = Schedule(config, total_steps=total_steps)
            case "noise_scale":
                self._signal = NoiseScale(config, min_samples=min_samples)
        self._config, self._entropy_gain = config, entropy_gain
        self._reference = Reference()
        self._setting = self._signal.initial
        self._held = 0
        """Number of further steps without a change."""

    @property
    def adjustment(self) -> Adjustment:
        """The settings before the first step, or after a resume."""
        return self._adjustment("in force since the start", {})

    def observe(self, learner: LearnerState) -> Adjustment:
        """Take in the report of an optimizer step. Returns the settings until the next step."""
        if learner.metrics.get("tokens", 1.0) > 0:
            self._reference.observe(learner.entropy, self._config)
        ratio, reference = self._reference.ratio, self._reference.value(self._config)
        wanted, reason = self._signal.wanted(self._setting, ratio, learner.metrics)
        changed = wanted != self._setting and self._held == 0
        if self._held:
            reason += f"; held for {self._held} more steps"
        if changed:
            self._setting = wanted
        self._held = self._config.hold_steps if changed else max(self._held - 1, 0)
        inputs = {"entropy": learner.entropy, "ratio": ratio, "wanted_factor": wanted.factor}
        inputs |= {} if reference is None else {"reference": reference}
        if self._config.signal == "entropy":
            inputs |= dict(zip(("normal_below", "low_below"), self._config.levels, strict=True))
        inputs |= {name: learner.metrics[name] for name in ("noise_signal", "noise_trace") if name in learner.metrics}
        return self._adjustment(reason, inputs)

    def _adjustment(self, reason: str, inputs: dict[str, float]) -> Adjustment:
        return Adjustment(
            factor=self._setting.factor,
            preference=preference(self._reference.ratio, self._entropy_gain),
            reason=reason,
            inputs={name: value for name, value in inputs.items() if math.isfinite(value)},
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return {
            "name": self._config.signal,
            "reference": msgspec.to_builtins(self._reference),
            "signal": msgspec.to_builtins(self._signal.state),
            "setting": list(self._setting),
            "held": self._held,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state. If it is from another signal, restore only the reference entropy."""
        self._reference = msgspec.convert(state["reference"], Reference)
        if state["name"] != self._config.signal:
            return
        self._signal.state = msgspec.convert(state["signal"], type(self._signal.state))
        self._setting, self._held = Setting(*state["setting"]), int(state["held"])
