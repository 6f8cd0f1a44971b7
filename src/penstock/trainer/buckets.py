"""Which samples share a micro-batch: cuts a sorted list where another pass is cheaper than the padding it saves."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

PASS_COST_TOKENS = 192
"""What one more forward and backward pass costs beyond its tokens, in tokens, on a CPU."""


@dataclass(slots=True)
class Bucket:
    """Samples of one micro-batch: their distinct prefixes, padded, and then what follows them, padded."""

    samples: list[int] = field(default_factory=list)
    prefixes: set[int] = field(default_factory=set)
    widest_prefix: int = 0
    widest_rest: int = 0
    real: int = 0
    """Tokens without padding, every prefix counted once."""

    @property
    def padded(self) -> int:
        """Tokens the model is fed."""
        return len(self.prefixes) * self.widest_prefix + len(self.samples) * self.widest_rest

    def cost(self, pass_cost: int) -> int:
        """Tokens fed plus the fixed cost of the passes."""
        return self.padded + pass_cost * (2 if self.widest_prefix else 1)

    def with_row(self, prefix: int, prefix_width: int, rest: int) -> tuple[int, int]:
        """(padded, real) tokens if it had one more row."""
        new = prefix not in self.prefixes
        prefixes = (len(self.prefixes) + new) * max(self.widest_prefix, prefix_width)
        rests = (len(self.samples) + 1) * max(self.widest_rest, rest)
        return prefixes + rests, self.real + rest + new * prefix_width

    def add(self, sample: int, prefix: int, prefix_width: int, rest: int) -> None:
        """One more row."""
        _, self.real = self.with_row(prefix, prefix_width, rest)
        self.samples.append(sample)
        self.prefixes.add(prefix)
        self.widest_prefix = max(self.widest_prefix, prefix_width)
        self.widest_rest = max(self.widest_rest, rest)


def plan(
    widths: Ints,
    prefix_widths: Ints,
    prefix_ids: Ints,
    max_tokens: int,
    *,
    share: bool,
    pass_cost: int = PASS_COST_TOKENS,
) -> list[Bucket]:
    """The cheapest of a few ways to put all samples of non-zero width into buckets. Arrays are [n].

    Rows cut by length alone; or, with `share`, each prefix once for its siblings, kept together or sorted by length.
    """
    samples = np.flatnonzero(widths)
    nothing = np.zeros_like(widths)
    by_width = samples[np.argsort(widths[samples], kind="stable")]
    plans = [_cut(by_width, widths, nothing, nothing, max_tokens, pass_cost)]
    if share and len(samples):
        rests = widths - prefix_widths
        widest = np.zeros(int(prefix_ids.max()) + 1, dtype=np.int64)
        np.maximum.at(widest, prefix_ids, rests)
        together = np.lexsort((rests[samples], prefix_ids[samples], widest[prefix_ids[samples]]))
        by_length = np.lexsort((prefix_ids[samples], rests[samples]))
        plans += [
            _cut(samples[order], rests, prefix_widths, prefix_ids, max_tokens, pass_cost)
            for order in (together, by_length)
        ]
    return min(plans, key=lambda buckets: sum(bucket.cost(pass_cost) for bucket in buckets))


def _cut(
    order: Ints, rests: Ints, prefix_widths: Ints, prefix_ids: Ints, max_tokens: int, pass_cost: int
) -> list[Bucket]:
    """Cut `order` where a bucket would exceed `max_tokens`, or waste more on padding than a pass costs."""
    rows = zip(
        order.tolist(), prefix_ids[order].tolist(), prefix_widths[order].tolist(), rests[order].tolist(), strict=True
    )
    buckets: list[Bucket] = []
    for sample, prefix, prefix_width, rest in rows:
        padded, real = buckets[-1].with_row(prefix, prefix_width, rest) if buckets else (0, 0)
        if not buckets or padded > max_tokens or padded - real > pass_cost:
            buckets.append(Bucket())
        buckets[-1].add(sample, prefix, prefix_width, rest)
    return buckets
