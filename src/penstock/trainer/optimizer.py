"""The optimizer of policy, critic and warm start."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.optim import AdamW

from penstock.trainer.ranks import BUCKET_ELEMENTS
from penstock.trainer.shards import like, local, whole

COUNTER = "step"
"""Name of the optimizer's counter of steps, which is no moment."""


class OffloadedAdamW(AdamW):
    """AdamW with moments that wait in main memory between steps. A step brings those of some parameters at a time to
    the device. Accumulated gradients and weights stay on the device."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override] # nothing computes the loss again
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:  # AdamW leaves out parameters without a gradient
            parameter.grad = None
        for numbers in _buckets(parameters):
            for number in numbers:
                parameters[number].grad = gradients[number]
            waiting = [self._arrived(parameters[number]) for number in numbers]
            super().step()
            for number, moments in zip(numbers, waiting, strict=True):
                self._leave(parameters[number], moments)
                parameters[number].grad = gradients[number] = None
        if parameters[0].device.type != "cpu":  # a checkpoint may read the moments now
            torch.accelerator.current_stream(parameters[0].device).synchronize()

    def place(self, parameter: Parameter, state: Mapping[str, Tensor]) -> None:
        """Set a parameter's state. Its moments go to main memory."""
        self.state[parameter] = dict(state)
        self._leave(parameter, {})

    def _arrived(self, parameter: Parameter) -> dict[str, Tensor]:
        """Bring the moments of a parameter to its device, and return those in main memory."""
        state = self.state.get(parameter, {})
        waiting = {name: value for name, value in state.items() if name != COUNTER}
        state |= {name: _moved(value, parameter.device) for name, value in waiting.items()}
        return waiting

    def _leave(self, parameter: Parameter, waiting: Mapping[str, Tensor]) -> None:
        """Copy the moments of a parameter to main memory: to where they were before, if they were there."""
        state = self.state.get(parameter, {})
        for name, value in state.items():
            if name != COUNTER:
                kept = waiting.get(name)
                kept = _in_main_memory(value) if kept is None else kept
                local(kept).copy_(local(value), non_blocking=True)
                state[name] = kept


def adamw(parameters: Sequence[Parameter], *, weight_decay: float = 0.0, offload: bool = False) -> AdamW:
    """Return an AdamW with the fastest kernels for the device: fused on CUDA, else foreach. `offload`: let the moments
    wait in main memory."""
    fused = parameters[0].device.type == "cuda"
    made = OffloadedAdamW if offload else AdamW
    return made(parameters, weight_decay=weight_decay, foreach=not fused, fused=fused)


def take_step(optimizer: AdamW, *, learning_rate: float, max_grad_norm: float) -> float:
    """Clip the gradients, apply them and drop them. Return their norm before clipping.

    If the norm is not finite, weights and optimizer stay unchanged.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norm = float(whole(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm, foreach=True)))
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def load_optimizer(optimizer: AdamW, state: Mapping[str, Any]) -> None:
    """Restore the complete optimizer state, with moments sharded like their parameters.

    The tensors are copied, since saved tensors may be mapped from files.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.load_state_dict({"state": {}, "param_groups": state["param_groups"]})
    for number, of_one in state["state"].items():
        parameter = parameters[number]
        loaded = {name: _loaded(name, value, parameter, optimizer) for name, value in of_one.items()}
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.place(parameter, loaded)
        else:
            optimizer.state[parameter] = loaded
    optimizer.zero_grad(set_to_none=True)


def _loaded(name: str, value: Any, parameter: Parameter, optimizer: AdamW) -> Tensor:
    if name != COUNTER:
        placed: Tensor = like(value, parameter)
        return placed.to(parameter.device, copy=True)
    fused = optimizer.defaults["fused"]  # its kernels count on the device
    return torch.as_tensor(value).to(parameter.device if fused else "cpu", torch.float32, copy=True)


def _buckets(parameters: Sequence[Parameter]) -> Iterator[list[int]]:
    """Yield runs of parameters, as numbers, with at most `BUCKET_ELEMENTS` elements on this rank. A larger one is
    alone."""
    bucket, size = list[int](), 0
    for number, parameter in enumerate(parameters):
        own = local(parameter).numel()
        if bucket and size + own > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(number)
        size += own
    if bucket:
        yield bucket


def _moved(value: Tensor, device: torch.device) -> Tensor:
    return value.to(device, non_blocking=True, copy=True)


def _in_main_memory(value: Tensor) -> Tensor:
    """Return a tensor in main memory like `value`, sharded like it. Its numbers are not set."""
    own = local(value)
    made = torch.empty_like(own, device="cpu", pin_memory=own.is_cuda)
    if not isinstance(value, DTensor):
        return made
    sharded: Any = DTensor  # `from_local` would move it to the device
    found: Tensor = sharded(made, value._spec, requires_grad=False)
    return found
