"""The trainer's weights on its device, as long as they are those of a published version.

Training does not wait for their reader. It copies one bucket at a time, and takes the rest from the published file once
they have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.weights.shared_memory import Placed


class Held(NamedTuple):
    """Weights of one version."""

    policy_version: int
    named: Mapping[str, Tensor]
    ready: Any
    """CUDA event after which they are complete; None on a CPU."""


class LiveWeights:
    """Lends the weights of the newest version to threads that send them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: Held | None = None

    def hold(self, policy_version: int, named: Mapping[str, Tensor]) -> None:
        """Lend whole weights, in any dtype. The kernels that compute them are on the current stream."""
        on_cuda = any(tensor.is_cuda for tensor in named.values())
        ready = torch.cuda.current_stream().record_event() if on_cuda else None
        with self._lock:
            self._held = Held(policy_version, named, ready)

    def withdraw(self) -> None:
        """End the loan, because the weights change. Wait for the bucket that is being copied."""
        with self._lock:
            self._held = None

    def copy(self, policy_version: int, bucket: Sequence[Placed], out: Tensor) -> bool:
        """Copy tensors of a version to `out`, [bytes] uint8, as the file has them, and wait for it. Return False if the
        weights have changed since."""
        with self._lock:
            held = self._held
            if held is None or held.policy_version != policy_version or any(t.name not in held.named for t in bucket):
                return False
            if held.ready is not None:
                torch.cuda.current_stream().wait_event(held.ready)
            sizes = [tensor.end - tensor.start for tensor in bucket]
            for part, tensor in zip(torch.split(out, sizes), bucket, strict=True):
                weight = held.named[tensor.name].detach()
                assert weight.numel() == prod(tensor.shape)
                part.view(tensor.dtype).copy_(weight.reshape(-1))
            if out.is_cuda:
                torch.cuda.current_stream().synchronize()
        return True
