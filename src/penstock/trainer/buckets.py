"""Which samples share a micro-batch: cuts a sorted list where another pass is cheaper than the waste."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

PASS_COST_TOKENS = 128
"""What one more forward and backward pass costs beyond its tokens, in tokens."""


@dataclass(slots=True)
class Bucket:
    """Samples of one micro-batch. The first `shared_width` columns of its rows are fed once per distinct prefix."""

    shared_width: int
    samples: list[int] = field(default_factory=list)
    prefixes: set[int] = field(default_factory=set)
    widest: int = 0
    real: int = 0
    """Tokens without padding, every prefix counted once in full."""

    @property
    def padded(self) -> int:
        """Tokens the model is fed."""
        return len(self.prefixes) * self.shared_width + len(self.samples) * (self.widest - self.shared_width)

    @property
    def cost(self) -> int:
        """Tokens fed plus the fixed cost of the passes."""
        return self.padded + PASS_COST_TOKENS * (2 if self.shared_width else 1)

    def add(self, sample: int, width: int, prefix_width: int, prefix: int) -> None:
        """One more row."""
        self.real += width - (prefix_width if prefix in self.prefixes else 0)
        self.samples.append(sample)
        self.prefixes.add(prefix)
        self.widest = max(self.widest, width)

    def would_waste(self, width: int, prefix_width: int, prefix: int, max_tokens: int) -> bool:
        """Whether one more row makes it too large, or costs more in padding than a pass of its own."""
        prefixes = len(self.prefixes | {prefix})
        padded = prefixes * self.shared_width + (len(self.samples) + 1) * (max(self.widest, width) - self.shared_width)
        real = self.real + width - (prefix_width if prefix in self.prefixes else 0)
        return padded > max_tokens or padded - real > PASS_COST_TOKENS


def cut(
    widths: Ints, prefix_widths: Ints, prefix_ids: Ints, chosen: npt.NDArray[np.bool_], max_tokens: int
) -> list[Bucket]:
    """Cut the `chosen` samples, in the order of prefix and width, into buckets. All arrays are [n].

    A bucket shares as much of its prefixes as all of them have. It feeds at most `max_tokens`, unless a single row
    exceeds them.
    """
    samples = np.flatnonzero(chosen)
    keys = np.where(prefix_widths > 0, prefix_ids, 0)
    order = samples[np.lexsort((widths[samples], keys[samples], prefix_widths[samples]))]
    rows = zip(order.tolist(), widths[order].tolist(), prefix_widths[order].tolist(), keys[order].tolist(), strict=True)
    buckets: list[Bucket] = []
    for sample, width, prefix_width, prefix in rows:
        if not buckets or buckets[-1].would_waste(width, prefix_width, prefix, max_tokens):
            buckets.append(Bucket(shared_width=prefix_width))
        buckets[-1].add(sample, width, prefix_width, prefix)
    return buckets
