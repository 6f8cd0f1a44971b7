"""The far side of `hosts.py`: holds one object, calls its methods when told to, answers on its standard output.

    frame = u32 length, big-endian | msgpack of a request or an answer

Whatever the object prints goes to standard error. The end of the requests is the end of this process, whatever it does.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import struct
import sys
import threading
from typing import Any, BinaryIO

import msgspec

from penstock.config import ConfigError
from penstock.config.imports import load
from penstock.envs.info import of_numpy
from penstock.envs.origin import origin

LENGTH = struct.Struct(">I")


class Make(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Hold `maker(*args)` from now on. Comes first, and once."""

    maker: str
    """`package.module:function`."""
    args: list[Any]


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call a method of what is held."""

    method: str
    args: list[Any]


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What it returned; nothing for `Make`."""

    value: Any = None


class Raised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What it raised."""

    kind: str
    message: str
    is_config: bool
    """A ConfigError."""
    place: str
    trace: str
    """Both as in `Origin`."""


Request = Make | Call
Answer = Returned | Raised


def frame(message: Request | Answer) -> bytes:
    """As it goes through the pipe. What is numpy's becomes plain."""
    body = msgspec.msgpack.encode(message, enc_hook=of_numpy)
    return LENGTH.pack(len(body)) + body


class Hosted:
    """The object, and how to call it."""

    def __init__(self) -> None:
        self._held: Any = None
        self._loop = asyncio.Runner()

    def answer(self, request: Request) -> bytes:
        """It is our guest who runs here: whatever it raises is its answer."""
        try:
            return frame(Returned(value=self._act(request)))
        except BaseException as error:
            kind, is_config, found = type(error).__name__, isinstance(error, ConfigError), origin(error)
            return frame(
                Raised(kind=kind, message=str(error), is_config=is_config, place=found.place, trace=found.trace)
            )

    def _act(self, request: Request) -> Any:
        if isinstance(request, Call):
            result = getattr(self._held, request.method)(*request.args)
            return self._loop.run(awaited(result)) if inspect.isawaitable(result) else result
        self._held = load(request.maker)(*request.args)
        return None


async def awaited(result: Any) -> Any:
    """What it comes to in the end."""
    return await result if inspect.isawaitable(result) else result


def read_requests(source: BinaryIO, requests: queue.Queue[Request]) -> None:
    """Until there are no more. Then nobody waits for an answer either."""
    decoder = msgspec.msgpack.Decoder(Request)
    while prefix := source.read(LENGTH.size):
        requests.put(decoder.decode(source.read(*LENGTH.unpack(prefix))))
    os._exit(0)


def main() -> None:
    source, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    requests: queue.Queue[Request] = queue.Queue()
    threading.Thread(target=read_requests, args=(source, requests), daemon=True).start()
    hosted = Hosted()
    while True:
        answers.write(hosted.answer(requests.get()))


if __name__ == "__main__":
    main()
