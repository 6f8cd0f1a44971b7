"""How long the model was computing: what `trainer_busy_s` counts."""

from __future__ import annotations

import torch

from penstock.model.compute import compute_seconds


class BusyClock:
    """Use as a context manager around model compute; `seconds` is the duration of the last one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = self._untold_s = 0.0

    def told(self) -> float:
        """Seconds since this was last asked."""
        seconds, self._untold_s = self._untold_s, 0.0
        return seconds

    def __enter__(self) -> BusyClock:
        self._start = compute_seconds(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = compute_seconds(self._device) - self._start
        self._untold_s += self.seconds
