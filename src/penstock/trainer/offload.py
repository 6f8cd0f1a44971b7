"""A device that is given up for a while: what a role of the trainer holds there waits in the machine's memory.

Every parameter stays the object that it is, so optimizers and whoever else refers to one need not know. What waits can
be read, and gathered from all ranks, but nothing is computed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

HOST = torch.device("cpu")


class Offload:
    """Of one rank of one role."""

    def __init__(self, device: torch.device, optimizer: Optimizer | None = None) -> None:
        """`optimizer`: whose state is on the device as far as it is large."""
        self._device, self._optimizer = device, optimizer
        self._modules: Sequence[Module] = ()
        self._states: list[tuple[dict[str, Any], str]] = []
        """Of the optimizer, by parameter: what was on the device, by name."""

    def release(self, modules: Sequence[Module]) -> None:
        """Move `modules` and the optimizer's state off the device, until `resume`."""
        self._modules, self._states = modules, self._on_device()
        self._move(HOST)

    def resume(self) -> None:
        """Move back what was moved."""
        self._move(self._device)
        self._modules, self._states = (), []

    def _on_device(self) -> list[tuple[dict[str, Any], str]]:
        """Counters may be elsewhere, and stay there."""
        if self._optimizer is None:
            return []
        return [
            (state, name)
            for state in self._optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and value.device == self._device
        ]

    def _move(self, device: torch.device) -> None:
        for module in self._modules:
            before = list(module.parameters())
            module._apply(lambda tensor: tensor.to(device, copy=True))  # type: ignore[no-untyped-call]
            if any(parameter is not moved for parameter, moved in zip(before, module.parameters(), strict=True)):
                raise RuntimeError(
                    f"torch {torch.__version__} makes other parameters when they move from {self._device}: use another "
                    "scheduler.mode than colocated there"
                )
        for state, name in self._states:
            state[name] = state[name].to(device, copy=True)
