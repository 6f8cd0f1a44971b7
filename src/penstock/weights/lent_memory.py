"""Memory of the trainer's device that a server of another engine, on the same device, copies: one bucket at a time.

`vllm_memory`: the handle is `ipc_handles_pickled` of vLLM's transfer `ipc`. One buffer is exported once, and filled
again for each bucket: vLLM has copied a bucket when its call returns, and counts one user for all of them.
`sglang_memory`: an entry of SGLang's `serialized_named_tensors`, (name, tensor) pairs. Each bucket has a buffer of its
own, which torch keeps as long as the server has it open.
"""

from __future__ import annotations

import base64
import pickle
import threading
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from penstock.ports.training import SendingWay
from penstock.weights.shared_memory import Placed

Fill = Callable[[int, Tensor], None]
"""Writes a bucket, by its number, to [bytes] uint8, and waits for it."""


class LentMemory:
    """The buffers of one group, at most for `most_s` seconds."""

    def __init__(
        self,
        way: SendingWay,
        buckets: Sequence[Sequence[Placed]],
        fill: Fill,
        device: torch.device,
        *,
        most_s: float,
        give_up: Callable[[], None],
    ) -> None:
        """`give_up`: called after `most_s`, unless the group is closed before."""
        self._way, self._buckets, self._fill, self._device = way, buckets, fill, device
        self._end = threading.Timer(most_s, give_up)
        self._end.daemon = True
        self._end.start()
        self._buffer: Tensor | None = None
        self._handle = ""

    def lend(self, number: int) -> str:
        """Return the payload with which the server finds a bucket. The one before is taken by then."""
        bucket = self._buckets[number]
        if self._way == "vllm_memory":
            buffer = self._buffer
            if buffer is None:
                self._buffer = buffer = self._new(max(map(_num_bytes, self._buckets)))
                self._handle = base64.b64encode(pickle.dumps(exported(buffer))).decode()
            self._fill(number, buffer[: _num_bytes(bucket)])
            return self._handle
        self._buffer = buffer = self._new(_num_bytes(bucket))
        self._fill(number, buffer)
        parts = torch.split(buffer, [tensor.end - tensor.start for tensor in bucket])
        pairs = [
            (tensor.name, part.view(tensor.dtype).reshape(tensor.shape))
            for tensor, part in zip(bucket, parts, strict=True)
        ]
        return base64.b64encode(ForkingPickler.dumps(pairs)).decode()

    def close(self) -> None:
        """Give the buffers back, once no server has them open."""
        self._end.cancel()
        self._buffer = None

    def _new(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def exported(buffer: Tensor) -> dict[str, tuple[Any, ...]]:
    """Return what vLLM needs to open memory of a device: torch's handle, under the UUID of the device."""
    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    _, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
    return {uuid: arguments}


def _num_bytes(bucket: Sequence[Placed]) -> int:
    return bucket[-1].end - bucket[0].start
