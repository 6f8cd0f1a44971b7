"""How the policy's entropy stands against its own recent past, and what `sjf` makes of it.

Raw entropy shifts with temperature, answer length and task mix, and falls almost monotonically early in training
(arXiv 2505.22617), so only its ratio to a running reference says anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

FLOOR = 1e-3
"""Nats per token. Entropies below it count as equal: a nearly deterministic policy must not look volatile."""
WEAKEST, STRONGEST = 0.25, 4.0
"""Bounds of `preference`."""


class Average:
    """An exponential average over about `steps` values: the plain mean at first, so that it starts unbiased."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.value = 0.0
        self.count = 0

    def add(self, value: float) -> None:
        self.count = min(self.count + 1, self._steps)
        self.value += (value - self.value) / self.count

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value, self.count = float(state["value"]), min(int(state["count"]), self._steps)


class RunningReference:
    """Entropy against its exponential average over about `steps` steps."""

    def __init__(self, steps: int) -> None:
        self._average = Average(steps)
        self.ratio = 1.0
        """The last one."""

    @property
    def value(self) -> float:
        """The reference, in nats per token; 0 before the first observation."""
        return self._average.value

    def observe(self, entropy: float) -> float:
        """entropy / reference, the reference as it was before. A value that is no entropy changes nothing."""
        if not math.isfinite(entropy) or entropy < 0:
            return self.ratio
        if self._average.count:
            self.ratio = max(entropy, FLOOR) / max(self._average.value, FLOOR)
        self._average.add(entropy)
        return self.ratio

    def state_dict(self) -> dict[str, float]:
        return {**self._average.state_dict(), "ratio": self.ratio}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._average.load_state_dict(state)
        self.ratio = float(state["ratio"])


def preference(ratio: float, gain: float) -> float:
    """ratio ** gain within [0.25, 4]: how strongly `sjf` counts predicted lengths. The higher the entropy, the more."""
    if ratio <= 0:
        return WEAKEST if gain > 0 else 1.0
    exponent = gain * math.log(ratio)  # in logarithms: a power of two large numbers overflows
    limit = math.log(STRONGEST)
    return min(max(math.exp(min(max(exponent, -limit), limit)), WEAKEST), STRONGEST)
