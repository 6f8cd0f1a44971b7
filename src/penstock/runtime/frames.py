"""Messages through a child's pipe. A message is a few frames of bytes; the two ends define their meaning.

message = u32 number of frames | u64 length of each frame | the frames
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

Frames = Sequence[Any]
"""Bytes, or objects that support the buffer protocol."""


def send(pipe: socket.socket, frames: Frames) -> None:
    """Send a message. Blocks until the pipe has accepted it. Raises OSError if the other end is gone."""
    for piece in _pieces(frames):
        pipe.sendall(piece)


def receive(pipe: socket.socket) -> list[bytearray]:
    """Wait for the next message and return its frames. Raises EOFError or OSError if the other end is gone."""
    (count,) = COUNT.unpack(_exactly(pipe, COUNT.size))
    lengths = struct.unpack(f">{count}Q", _exactly(pipe, 8 * count))
    return [_exactly(pipe, length) for length in lengths]


async def write(pipe: asyncio.StreamWriter, frames: Frames) -> None:
    """Send a message from an event loop. Raises ConnectionError if the other end is gone."""
    pipe.writelines(_pieces(frames))
    await pipe.drain()


async def read(pipe: asyncio.StreamReader) -> list[bytes]:
    """Wait in an event loop for the next message and return its frames.

    Raises IncompleteReadError or ConnectionError if the other end is gone."""
    (count,) = COUNT.unpack(await pipe.readexactly(COUNT.size))
    lengths = struct.unpack(f">{count}Q", await pipe.readexactly(8 * count))
    return [await pipe.readexactly(length) for length in lengths]


def _pieces(frames: Frames) -> list[Any]:
    """Return the bytes of a message: joined into one piece if it is small, otherwise without copying the frames."""
    lengths = [memoryview(frame).nbytes for frame in frames]
    pieces = [COUNT.pack(len(frames)) + struct.pack(f">{len(frames)}Q", *lengths), *frames]
    return [b"".join(pieces)] if sum(lengths) <= JOIN_BYTES else pieces


def _exactly(pipe: socket.socket, length: int) -> bytearray:
    frame = bytearray(length)
    view = memoryview(frame)
    while len(view):
        received = pipe.recv_into(view)
        if not received:
            raise EOFError("the other end is gone")
        view = view[received:]
    return frame
