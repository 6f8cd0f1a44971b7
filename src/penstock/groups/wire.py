"""Messages between a driver and its worker processes: pickles whose arrays travel beside them, uncopied.

    message = number, frames, (u64 length of each frame), frames, seal; the first frame is the pickle, the others its
              buffers; the seal is left out between the ends of a socket pair

For two ends that know each other: of a private socket pair, or of a connection on which both have shown the same key,
and whose messages are sealed with it (`link`). Never for a port that answers strangers.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.groups.link import SEAL_BYTES, Seals, exactly

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


class Wire:
    """One end of a connection. One thread sends, and one receives."""

    def __init__(self, link: socket.socket, seals: Seals | None = None) -> None:
        self.link, self._seals = link, seals

    def send(self, number: int, frames: Frames) -> None:
        lengths = [memoryview(frame).nbytes for frame in frames]
        head = HEAD.pack(number, len(frames)) + struct.pack(f">{len(frames)}Q", *lengths)
        self.link.sendall(head)
        for frame in frames:
            self.link.sendall(frame)
        if self._seals is not None:
            self.link.sendall(self._seals.of_sent([head, *frames]))

    def receive(self) -> tuple[int, Frames]:
        """Raises EOFError when the other end is gone, `Forged` for what it did not send."""
        head = exactly(self.link, HEAD.size)
        number, count = HEAD.unpack(head)
        head += exactly(self.link, 8 * count)
        frames = [exactly(self.link, length) for length in struct.unpack_from(f">{count}Q", head, HEAD.size)]
        if self._seals is not None:
            self._seals.check([head, *frames], exactly(self.link, SEAL_BYTES))
        return number, frames
