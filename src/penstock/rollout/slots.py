"""KV slots: preallocated keys and values of every layer, one slot per sequence that is being generated.

Active sequences occupy slots 0..n-1 without holes, so that a step touches nothing else. `Regrouping` also keeps
sequences of similar length together: attention pads a group of rows to its longest, and with long-tailed lengths
padding to the longest of all would dominate the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

GROUP_ROWS = 32
"""Rows that share one attention call: small enough to keep padding low, large enough to keep calls few."""


class LayerSlots(NamedTuple):
    """One layer of the cache."""

    keys: torch.Tensor  # [S, K, C, D]
    values: torch.Tensor  # [S, K, C, D]


class SlotCache:
    """Keys and values of all layers, each `[layers, S, K, C, D]` (dimensions as in `attention`)."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._shape = (num_layers, num_slots, num_kv_heads, max_context, head_dim)
        self.num_kv_heads, self.max_context, self.head_dim = num_kv_heads, max_context, head_dim
        self.dtype, self.device = dtype, device
        self.allocate()

    def allocate(self) -> None:
        """Take the memory; everything in it is forgotten."""
        # Zeros, not empty: masked positions are multiplied by 0, which uninitialised NaNs would survive.
        self._keys, self._values = (torch.zeros(self._shape, dtype=self.dtype, device=self.device) for _ in range(2))

    def free(self) -> None:
        """Give the memory back to the system; nothing may be read or written before the next `allocate`."""
        self._keys = self._values = torch.empty(0, dtype=self.dtype, device=self.device)
        if self.device.type != "cpu":
            torch.get_device_module(self.device).empty_cache()

    def layer(self, index: int) -> LayerSlots:
        return LayerSlots(self._keys[index], self._values[index])

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `source` to slots `target`; the two may overlap."""
        self._keys[:, target, :, :length] = self._keys[:, source, :, :length]
        self._values[:, target, :, :length] = self._values[:, source, :, :length]

    def erase(self, slot: int) -> None:
        """Forget a slot whose sequence went non-finite, so that it cannot poison the slot's next user."""
        self._keys[:, slot] = 0
        self._values[:, slot] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouping:
    """Slot moves: `source[i]` goes to `target[i]`, all at once."""

    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]


def regroup(lengths: npt.NDArray[np.int64], live: npt.NDArray[np.bool_]) -> Regrouping:
    """Close the holes left by rows that are not `live`, longest rows to the front, at group granularity.

    A row whose group is already right stays where it is, so one departure moves at most one row per group.
    """
    rows = np.flatnonzero(live)
    longest_first = rows[np.argsort(-lengths[rows], kind="stable")]
    group = np.empty(len(lengths), dtype=np.int64)
    group[longest_first] = np.arange(len(rows)) // GROUP_ROWS
    stays = (group[rows] == rows // GROUP_ROWS) & (rows < len(rows))
    movers = rows[~stays]
    free = np.ones(len(rows), dtype=np.bool_)
    free[rows[stays]] = False
    return Regrouping(source=movers[np.argsort(group[movers], kind="stable")], target=np.flatnonzero(free))
