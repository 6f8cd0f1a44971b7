"""Messages between a driver and its workers: a pickle, followed by the buffers of its arrays without a copy.

Use this only between ends that trust each other: a child's pipe, or a channel on which both ends prove their keys. A
group's worker is code of the run, and its tensors and exceptions need pickle. Foreign code, such as an isolated
environment, answers in msgpack instead (`envs`).
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from penstock.runtime.frames import Frames

OWN_FRAME_BYTES = 1 << 16
"""Buffers below this size are copied into the pickle, because a frame of their own costs more."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A value that is pickled once and can be sent several times."""

    frames: Frames

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return unpack, ([pickle.PickleBuffer(frame) for frame in self.frames],)


def pack(value: Any) -> Frames:
    buffers: list[pickle.PickleBuffer] = []

    def in_band(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < OWN_FRAME_BYTES:
            return True
        buffers.append(buffer)
        return False

    return [pickle.dumps(value, protocol=5, buffer_callback=in_band), *(buffer.raw() for buffer in buffers)]


def unpack(frames: Frames) -> Any:
    return pickle.loads(frames[0], buffers=frames[1:])
