"""What moves the trigger's thresholds as training goes on: the policy's entropy, time, or the gradient noise scale.

Once per optimizer step a signal says which factor of N_min and T_max it wants. A change is followed by `hold_steps`
steps without another, whatever the signal (after a change the signal must first show its effect). The trigger clamps
what comes out. How strongly `sjf` prefers short answers follows entropy whatever the signal is.

Entropy as a driver is the design note's rule and unvalidated; the schedule over time and the noise scale (arXiv
1812.06162) are what it has to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from penstock.config.scheduling import FeedbackConfig, TriggerConfig
from penstock.scheduler.entropy import Average, RunningReference, preference
from penstock.types import LearnerState

Level = Literal["low", "normal", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """What is in force until the next optimizer step."""

    samples_factor: float
    wait_factor: float
    preference: float
    """How strongly `sjf` counts predicted lengths."""
    level: Level
    """Of entropy, or what the other signals amount to: `high` is thresholds below the configured ones, `low` above."""
    reason: str
    inputs: dict[str, float]
    changed: bool
    """The factors are not those of the step before."""


class Setting(NamedTuple):
    """Where a signal wants the thresholds."""

    level: Level
    factor: float


NORMAL = Setting("normal", 1.0)


class Signal(Protocol):
    """Says where the thresholds should be; keeps what it must remember in `state_dict`."""

    def initial(self) -> Setting:
        """Before the first optimizer step."""
        ...

    def wanted(self, current: Setting, ratio: float, metrics: Mapping[str, float]) -> tuple[Setting, str]:
        """After one more optimizer step, entropy being `ratio` times its reference; and why."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Fixed:
    """Thresholds as configured."""

    def initial(self) -> Setting:
        return NORMAL

    def wanted(self, current: Setting, ratio: float, metrics: Mapping[str, float]) -> tuple[Setting, str]:
        return NORMAL, "thresholds are fixed"

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to remember."""


class EntropyLevel(Fixed):
    """Three levels: entered beyond the band around the reference, left at half of it."""

    def __init__(self, config: FeedbackConfig) -> None:
        self._config = config

    def wanted(self, current: Setting, ratio: float, metrics: Mapping[str, float]) -> tuple[Setting, str]:
        band, half = self._config.band, self._config.band / 2
        if ratio > 1 + band or (current.level == "high" and ratio > 1 + half):
            setting = Setting("high", self._config.factor_high)
        elif ratio < 1 - band or (current.level == "low" and ratio < 1 - half):
            setting = Setting("low", self._config.factor_low)
        else:
            setting = NORMAL
        return setting, f"entropy is {setting.level}: {ratio:.3f} times its reference"


class Schedule:
    """Geometrically from `factor_high` in the first step to `factor_low` in the last, in stairs of hold_steps + 1."""

    def __init__(self, config: FeedbackConfig, *, total_steps: int) -> None:
        self._config, self._total, self._num_steps = config, total_steps, 0

    def initial(self) -> Setting:
        return self._at(0)

    def wanted(self, current: Setting, ratio: float, metrics: Mapping[str, float]) -> tuple[Setting, str]:
        self._num_steps += 1
        setting = self._at(self._num_steps)
        return setting, f"{self._num_steps} of {self._total} steps are done: factor {setting.factor:.3g}"

    def _at(self, steps_done: int) -> Setting:
        stride = self._config.hold_steps + 1
        last = (self._total - 1) // stride
        share = min(steps_done // stride / last, 1.0) if last else 0.0
        return _setting(self._config.factor_high ** (1 - share) * self._config.factor_low**share)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._num_steps = int(state["num_steps"])


class NoiseScale:
    """N_min at the gradient noise scale B_simple = tr(S) / |G|^2 (arXiv 1812.06162), moved when it leaves the band.

    Numerator and denominator are averaged apart, since the ratio of two noisy numbers is biased; a denominator that is
    still not positive says that the signal drowns in noise so far, and nothing moves.
    """

    def __init__(self, config: FeedbackConfig, *, min_samples: int) -> None:
        self._band, self._min_samples = config.band, min_samples
        self._trace, self._signal = Average(config.reference_steps), Average(config.reference_steps)

    def initial(self) -> Setting:
        return NORMAL

    def wanted(self, current: Setting, ratio: float, metrics: Mapping[str, float]) -> tuple[Setting, str]:
        trace, signal = metrics.get("noise_trace", math.nan), metrics.get("noise_signal", math.nan)
        if math.isfinite(trace) and math.isfinite(signal):
            self._trace.add(trace)
            self._signal.add(signal)
        if self._trace.value <= 0 or self._signal.value <= 0:
            return current, "no gradient noise scale yet"
        samples = self._trace.value / self._signal.value
        factor = samples / self._min_samples
        if not math.isfinite(factor) or factor <= 0 or abs(factor / current.factor - 1) <= self._band:
            return current, f"gradient noise scale {samples:.4g} samples: within the band"
        return _setting(factor), f"gradient noise scale {samples:.4g} samples: {factor:.3g} times N_min"

    def state_dict(self) -> dict[str, Any]:
        return {"trace": self._trace.state_dict(), "signal": self._signal.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._trace.load_state_dict(state["trace"])
        self._signal.load_state_dict(state["signal"])


class Feedback:
    """A signal, the hold after each change, and the preference that entropy gives."""

    def __init__(self, name: str, signal: Signal, config: FeedbackConfig, *, entropy_gain: float) -> None:
        self._name, self._signal = name, signal
        self._hold_steps, self._entropy_gain = config.hold_steps, entropy_gain
        self._reference = RunningReference(config.reference_steps)
        self._setting = signal.initial()
        self._held = 0
        """Steps for which there is still no change."""

    @property
    def adjustment(self) -> Adjustment:
        """What is in force before the first step, or after a resume."""
        return self._adjustment("in force since the start", {}, changed=False)

    def observe(self, learner: LearnerState) -> Adjustment:
        """Once per optimizer step: what is in force until the next."""
        trained = learner.metrics.get("tokens", 1.0) > 0
        reference = self._reference.value
        ratio = self._reference.observe(learner.entropy) if trained else self._reference.ratio
        wanted, reason = self._signal.wanted(self._setting, ratio, learner.metrics)
        changed = wanted != self._setting and self._held == 0
        if self._held:
            reason += f"; held for {self._held} more steps"
        if changed:
            self._setting = wanted
        self._held = self._hold_steps if changed else max(self._held - 1, 0)
        inputs = {"entropy": learner.entropy, "reference": reference, "ratio": ratio, "wanted_factor": wanted.factor}
        inputs |= {name: learner.metrics[name] for name in ("noise_signal", "noise_trace") if name in learner.metrics}
        return self._adjustment(reason, inputs, changed=changed)

    def _adjustment(self, reason: str, inputs: dict[str, float], *, changed: bool) -> Adjustment:
        return Adjustment(
            samples_factor=self._setting.factor,
            wait_factor=self._setting.factor,
            preference=preference(self._reference.ratio, self._entropy_gain),
            level=self._setting.level,
            reason=reason,
            inputs={name: value for name, value in inputs.items() if math.isfinite(value)},
            changed=changed,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self._name,
            "reference": self._reference.state_dict(),
            "signal": self._signal.state_dict(),
            "setting": list(self._setting),
            "held": self._held,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; one of another signal gives only the entropy's reference."""
        self._reference.load_state_dict(state["reference"])
        if state["name"] != self._name:
            return
        self._signal.load_state_dict(state["signal"])
        self._setting, self._held = Setting(*state["setting"]), int(state["held"])


def feedback(config: TriggerConfig, *, entropy_gain: float, total_steps: int, min_samples: int) -> Feedback:
    """The feedback that `scheduler.trigger.feedback` asks for. `min_samples` is what its factors multiply (N_min)."""
    settings = config.feedback
    signal: Signal
    match settings.signal:
        case "entropy":
            signal = EntropyLevel(settings)
        case "time":
            signal = Schedule(settings, total_steps=total_steps)
        case "noise_scale":
            signal = NoiseScale(settings, min_samples=min_samples)
        case "none":
            signal = Fixed()
    return Feedback(settings.signal, signal, settings, entropy_gain=entropy_gain)


def _setting(factor: float) -> Setting:
    level: Level = "high" if factor < 1 else "low" if factor > 1 else "normal"
    return Setting(level, factor)
