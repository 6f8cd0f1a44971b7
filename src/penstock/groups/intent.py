"""Intents: how a call distributes an argument. The method declares an intent per argument, or leaves it to the call.

Only the kind of the intent decides, never a length. A list that happens to be as long as the group is broadcast like
any other value, unless it is given as `PerRank`. A declaration is an intent without a value; a call passes an intent
with a value.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from penstock.groups.batch import PADDING, Batch

DECLARED: Final = object()
"""Marks an intent without a value, which is a declaration."""

Uneven = Literal["pad", "refuse", "allow"]


@dataclass(frozen=True, slots=True, eq=False)
class Intent(ABC):
    """The way in which a call distributes an argument."""

    value: Any = DECLARED

    @abstractmethod
    def split(self, name: str, value: Any, num_parts: int) -> Sequence[Any]:
        """Return the argument `name` of each part. Raises ValueError if `value` does not fit."""


class Broadcast(Intent):
    """Every worker gets the whole argument."""

    def split(self, name: str, value: Any, num_parts: int) -> Sequence[Any]:
        return [value] * num_parts


@dataclass(frozen=True, slots=True, eq=False)
class Shard(Intent):
    """Part i of n gets the i-th of n runs of neighbouring samples of a `Batch`."""

    uneven: Uneven = field(default="pad", kw_only=True)
    """Handling of a batch with a length that n does not divide.

    `pad`: copies of its last sample fill it up, marked in `Batch.is_padding`. The method must not count them, and they
    are removed from its result. `refuse`: the call is refused. `allow`: lengths differ by one; for methods with a
    result that does not depend on the cut."""

    def split(self, name: str, value: Any, num_parts: int) -> Sequence[Any]:
        if not isinstance(value, Batch):
            raise ValueError(f"{name} is sharded, expected a Batch, given {type(value).__name__}")
        if len(value) % num_parts and (self.uneven == "refuse" or (self.uneven == "pad" and PADDING in value.columns)):
            padded = " that are padded already: unpad them" if self.uneven == "pad" else ""
            raise ValueError(
                f"{name} is sharded over {num_parts} parts, expected a multiple of {num_parts} samples, "
                f"given {len(value)}{padded}"
            )
        return value.chunk(num_parts, pad=self.uneven == "pad")


class PerRank(Intent):
    """Part i of n gets element i of a list or tuple of length n."""

    def split(self, name: str, value: Any, num_parts: int) -> Sequence[Any]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{name} is per rank, expected list or tuple of {num_parts}, given {type(value).__name__}")
        if len(value) != num_parts:
            raise ValueError(f"{name} is per rank, expected {num_parts} values, given {len(value)}")
        return value


class BroadcastFunction(Broadcast):
    """Every worker gets the function, which must be callable."""

    def split(self, name: str, value: Any, num_parts: int) -> Sequence[Any]:
        if not callable(value):
            raise ValueError(f"{name} is a function to be run, expected a callable, given {type(value).__name__}")
        return super().split(name, value, num_parts)
