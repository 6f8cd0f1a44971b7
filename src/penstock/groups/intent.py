"""What a call does with an argument: declared per argument, or said at the call of one that is left open.

The kind of the intent decides, never a length: a list that happens to be as long as the group is broadcast like any
other, unless it is given as `PerRank`. An intent without a value declares, one with a value is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from penstock.groups.batch import PADDING, Batch

DECLARED: Final = object()
"""In place of a value: the intent only declares."""

Uneven = Literal["pad", "refuse", "allow"]


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """Every worker gets the whole argument."""

    value: Any = DECLARED

    def split(self, value: Any, num_parts: int) -> Sequence[Any]:
        return [value] * num_parts


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """Part i of n gets the i-th of n runs of neighbouring samples of a `Batch`."""

    value: Any = DECLARED
    uneven: Uneven = field(default="pad", kw_only=True)
    """What happens to a batch that n does not divide. `pad`: copies of its last sample fill it up, marked in
    `Batch.is_padding`; they must not count in what the method computes, and are taken out of what it returns. `refuse`:
    the call is. `allow`: lengths differ by one; for methods whose result does not depend on the cut."""

    def split(self, value: Any, num_parts: int) -> Sequence[Any]:
        if not isinstance(value, Batch):
            raise ValueError(f"is sharded, expected a Batch, given {type(value).__name__}")
        if len(value) % num_parts and (self.uneven == "refuse" or (self.uneven == "pad" and PADDING in value.columns)):
            padded = " that are padded already: unpad them" if self.uneven == "pad" else ""
            raise ValueError(
                f"is sharded over {num_parts} parts, expected a multiple of {num_parts} samples, "
                f"given {len(value)}{padded}"
            )
        return value.chunk(num_parts, pad=self.uneven == "pad")


@dataclass(frozen=True, slots=True, eq=False)
class PerRank:
    """Part i of n gets element i of a list or tuple of n."""

    value: Any = DECLARED

    def split(self, value: Any, num_parts: int) -> Sequence[Any]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"is per rank, expected a list or tuple of {num_parts}, given {type(value).__name__}")
        if len(value) != num_parts:
            raise ValueError(f"is per rank, expected {num_parts} values, given {len(value)}")
        return value


@dataclass(frozen=True, slots=True, eq=False)
class BroadcastFunction(Broadcast):
    """Every worker gets the function."""

    def split(self, value: Any, num_parts: int) -> Sequence[Any]:
        if not callable(value):
            raise ValueError(f"is a function to be run, expected a callable, given {type(value).__name__}")
        return [value] * num_parts


Intent = Broadcast | Shard | PerRank
