"""Messages through a child's pipe. A message is a few frames of bytes; the two ends define their meaning.

message = u32 number of frames | u64 length of each frame | the frames

The receiver checks the number and the lengths before it reads on, so the other end cannot make it allocate more than
`max_bytes`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Any

COUNT = struct.Struct(">I")
JOIN_BYTES = 1 << 16
"""Messages of at most this many bytes are sent in one piece."""
MAX_FRAMES = 1 << 16
"""A message has at most this many frames: one, and one for each large array."""
MAX_BYTES = 1 << 36
"""Default limit of a message, for ends that trust each other: the arrays of a large model."""

Frames = Sequence[Any]
"""Bytes, or objects that support the buffer protocol."""


class MalformedMessage(ConnectionError):
    """The other end sent bytes that are no message, or a message that is too large. The pipe cannot be used again."""


def send(pipe: socket.socket, frames: Frames) -> None:
    """Send a message. Blocks until the pipe has accepted it. Raises OSError if the other end is gone."""
    for piece in _pieces(frames):
        pipe.sendall(piece)


def receive(pipe: socket.socket, *, max_bytes: int = MAX_BYTES) -> list[bytearray]:
    """Wait for the next message and return its frames, at least one.

    Raises EOFError or OSError if the other end is gone, and `MalformedMessage` for a message above `max_bytes`."""
    count = _count(_exactly(pipe, COUNT.size))
    lengths = _lengths(_exactly(pipe, 8 * count), max_bytes)
    return [_exactly(pipe, length) for length in lengths]


async def write(pipe: asyncio.StreamWriter, frames: Frames) -> None:
    """Send a message from an event loop. Raises ConnectionError if the other end is gone."""
    pipe.writelines(_pieces(frames))
    await pipe.drain()


async def read(pipe: asyncio.StreamReader, *, max_bytes: int = MAX_BYTES) -> list[bytes]:
    """Wait in an event loop for the next message and return its frames, at least one.

    Raises IncompleteReadError or ConnectionError if the other end is gone, and `MalformedMessage` for a message above
    `max_bytes`."""
    count = _count(await pipe.readexactly(COUNT.size))
    lengths = _lengths(await pipe.readexactly(8 * count), max_bytes)
    return [await pipe.readexactly(length) for length in lengths]


def _pieces(frames: Frames) -> list[Any]:
    """Return the bytes of a message: joined into one piece if it is small, otherwise without copying the frames."""
    lengths = [memoryview(frame).nbytes for frame in frames]
    pieces = [COUNT.pack(len(frames)) + struct.pack(f">{len(frames)}Q", *lengths), *frames]
    return [b"".join(pieces)] if sum(lengths) <= JOIN_BYTES else pieces


def _count(prefix: bytes | bytearray) -> int:
    """Return the number of frames. Raises `MalformedMessage`."""
    count: int = COUNT.unpack(prefix)[0]
    if not 1 <= count <= MAX_FRAMES:
        raise MalformedMessage(f"the other end sent a message of {count} frames: it must have 1 to {MAX_FRAMES}")
    return count


def _lengths(packed: bytes | bytearray, max_bytes: int) -> tuple[int, ...]:
    """Return the lengths of the frames. Raises `MalformedMessage`."""
    lengths = struct.unpack(f">{len(packed) // 8}Q", packed)
    if sum(lengths) > max_bytes:
        raise MalformedMessage(f"the other end sent a message of {sum(lengths)} bytes: at most {max_bytes} are allowed")
    return lengths


def _exactly(pipe: socket.socket, length: int) -> bytearray:
    frame = bytearray(length)
    view = memoryview(frame)
    while len(view):
        received = pipe.recv_into(view)
        if not received:
            raise EOFError("the other end is gone")
        view = view[received:]
    return frame
