"""Method calls on an object in a worker process, encoded as msgpack; and the worker's side, which holds the object.

The object is user code and its process is not trusted. So answers are data of known types, and nothing is unpickled.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import msgspec

from penstock.config import ConfigError
from penstock.config.imports import load
from penstock.envs.exception_location import Origin, origin
from penstock.runtime.frames import Frames
from penstock.sendable import fault_of, sendable

MAX_INFO_BYTES = 1 << 16
"""A larger value of an environment's `info` becomes the beginning of its text."""
MAX_INFO_MEMORY = 1 << 18
"""So does a value that takes more memory: an empty list has one byte in a message."""
OF_CONTAINER, OF_SCALAR = 80, 32
"""Bytes in memory of an empty list or dictionary, and of a number, each with the reference to it."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """Call a method of the object. The first call, with `package.module:function` as its method, creates the object."""

    method: str
    args: list[Any]


class Returned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The method's result; None for the first call."""

    value: Any = None


class Raised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The method's exception."""

    kind: str
    message: str
    is_config: bool
    """Whether the exception is a ConfigError."""
    origin: Origin


Answer = Returned | Raised
MOST_SHOWN = 8_000
"""Most characters of one text of an error that are kept."""


def encode(message: Call | Answer) -> Frames:
    """Return the message as frames. NumPy values become plain Python values."""
    return [msgspec.msgpack.encode(message, enc_hook=of_numpy)]


def shown(text: str) -> str:
    """Return a text of an error that can be printed: cut, and without control characters other than line breaks."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text[:MOST_SHOWN])


class ObjectWorker:
    """The worker's side: holds the object and calls its methods."""

    def __init__(self) -> None:
        self._object: Any = None
        self._loop = asyncio.Runner()

    def answer(self, request: Frames) -> Frames:
        """Carry out a request and return the answer. Every exception of the object becomes an answer, even
        `SystemExit`."""
        try:
            return encode(Returned(value=self._result_of(msgspec.msgpack.decode(request[0], type=Call))))
        except BaseException as error:
            kind, is_config = type(error).__name__, isinstance(error, ConfigError)
            return encode(Raised(kind=kind, message=sendable(str(error)), is_config=is_config, origin=origin(error)))

    def _result_of(self, call: Call) -> Any:
        if self._object is None:
            self._object = load(call.method)(*call.args)
            return None
        result = getattr(self._object, call.method)(*call.args)
        return self._loop.run(awaited(result)) if inspect.isawaitable(result) else result


async def awaited(result: Any) -> Any:
    """Return `result`, awaited if it is awaitable."""
    return await result if inspect.isawaitable(result) else result


def plain(value: object) -> Any:
    """Return the value in JSON's types. A value without such a form, or one that a message cannot carry, becomes
    text."""
    try:
        found = msgspec.to_builtins(value, enc_hook=_as_text)
        is_small = memory_of(found) <= MAX_INFO_MEMORY and len(msgspec.msgpack.encode(found)) <= MAX_INFO_BYTES
        if is_small and fault_of(found) is None:
            return found
        return sendable(str(found))
    except (TypeError, ValueError, OverflowError, RecursionError):
        return sendable(_shown(value))


def memory_of(value: object) -> int:
    """Return about how many bytes a value in JSON's types takes in memory. The count ends above `MAX_INFO_MEMORY`."""
    waiting, size = [value], 0
    while waiting and size <= MAX_INFO_MEMORY:
        each = waiting.pop()
        size += OF_CONTAINER if isinstance(each, dict | list | tuple) else OF_SCALAR
        if isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, str):
            size += len(each)
    return size


def _shown(value: object) -> str:
    try:
        return str(value)
    except Exception as error:  # RecursionError, ValueError of an integer with too many digits, or an object's own
        return f"a {type(value).__name__} without text ({type(error).__name__})"


def _as_text(value: object) -> Any:
    try:
        return of_numpy(value)
    except TypeError:
        return str(value)


def of_numpy(value: Any) -> Any:
    """Return a NumPy number or array as Python's own numbers and lists. Raises TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot leave its process")
