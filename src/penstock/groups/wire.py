"""Messages between a driver and its worker processes: pickles whose arrays travel beside them, uncopied.

    message = number, frames, (u64 length of each frame), frames; the first frame is the pickle, the others its buffers

For two ends that know each other: of a private socket pair, or of a connection on which both have shown the same key
(`link`). Never for a port that answers strangers.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HEAD = struct.Struct(">QI")
OWN_FRAME_BYTES = 1 << 16
"""Smaller buffers are copied into the pickle: a frame costs more than that."""

Frames = Sequence[Any]
"""Of bytes, or of what shows its memory as such."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A value that is pickled once and sent several times."""

    frames: Frames

    @classmethod
    def of(cls, value: Any) -> Packed:
        return cls(pack(value))

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


def send(link: socket.socket, number: int, frames: Frames) -> None:
    lengths = [memoryview(frame).nbytes for frame in frames]
    link.sendall(HEAD.pack(number, len(frames)) + struct.pack(f">{len(frames)}Q", *lengths))
    for frame in frames:
        link.sendall(frame)


def receive(link: socket.socket) -> tuple[int, Frames]:
    """Raises EOFError when the other end is gone."""
    number, count = HEAD.unpack(exactly(link, HEAD.size))
    lengths = struct.unpack(f">{count}Q", exactly(link, 8 * count))
    return number, [exactly(link, length) for length in lengths]


def exactly(link: socket.socket, length: int) -> bytearray:
    """So many bytes. Raises EOFError when the other end is gone before."""
    frame = bytearray(length)
    view = memoryview(frame)
    while len(view):
        received = link.recv_into(view)
        if not received:
            raise EOFError("the other end is gone")
        view = view[received:]
    return frame
