"""Messages between the tests and the program, which run in two sandboxes and share one socket (standard library only).

Values are plain data, copied as exact built-in types. For all other objects the two sides agree on handles.

message = u32 length | JSON; every value that JSON lacks is a list of a tag and its parts
"""

from __future__ import annotations

import json
import resource
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

LENGTH = struct.Struct(">I")
MOST_BYTES = 16 << 20
"""Size of the largest message."""
MOST_DEPTH = 50
"""Greatest depth of nested data."""
BETWEEN = ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "matmul", "or", "and", "xor")
"""Operators between two objects of the program."""
NESTED: dict[str, Callable[[Any], Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}
HANDLE, ERROR_CLASS, MODULE = "h", "e", "m"


class Broken(Exception):
    """The other side sent something that is no message."""


def send(pipe: socket.socket, message: Any) -> None:
    content = json.dumps(message).encode()
    pipe.sendall(LENGTH.pack(len(content)) + content)


def receive(pipe: socket.socket) -> Any:
    """Return the next message. Raises `Broken`, also if the other side is gone."""
    (length,) = LENGTH.unpack(_exactly(pipe, LENGTH.size))
    if length > MOST_BYTES:
        raise Broken
    try:
        return json.loads(_exactly(pipe, length))
    except (ValueError, RecursionError):
        raise Broken from None


def _exactly(pipe: socket.socket, length: int) -> bytes:
    content = bytearray()
    while len(content) < length:
        try:
            piece = pipe.recv(min(length - len(content), 1 << 20))
        except OSError:
            raise Broken from None
        if not piece:
            raise Broken
        content += piece
    return bytes(content)


def encode(value: Any, handle: Callable[[Any], Any], depth: int = MOST_DEPTH) -> Any:
    """Return a value in JSON's types. `handle`: encodes an object that is no plain data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["i", hex(int.__index__(value))]
    if isinstance(value, float):
        return ["f", float.hex(value)]
    if isinstance(value, complex):
        return ["c", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if depth == 0:
        raise ValueError(f"data nested more than {MOST_DEPTH} deep cannot be passed")
    if isinstance(value, dict):
        pairs = dict.items(value)
        return ["d", [[encode(key, handle, depth - 1), encode(each, handle, depth - 1)] for key, each in pairs]]
    for tag, kind in NESTED.items():
        if isinstance(value, kind):  # type: ignore[arg-type]
            return [tag, [encode(each, handle, depth - 1) for each in kind.__iter__(value)]]  # type: ignore[attr-defined]
    return handle(value)


def decode(data: Any, handle: Callable[[str, Any], Any], depth: int = MOST_DEPTH + 2) -> Any:
    """Return the value of `encode`, as exact built-in types. Raises `Broken`."""
    if data is None or isinstance(data, bool | str):
        return data
    if depth == 0 or not isinstance(data, list) or not 2 <= len(data) <= 3:
        raise Broken
    tag, given = data[0], data[1]
    try:
        match tag:
            case "i":
                return int(given, 16)
            case "f":
                return float.fromhex(given)
            case "c":
                return complex(float.fromhex(given), float.fromhex(data[2]))
            case "b":
                return bytes.fromhex(given)
            case "d":
                return {decode(key, handle, depth - 1): decode(each, handle, depth - 1) for key, each in given}
            case "l" | "t" | "s" | "z":
                return NESTED[tag]([decode(each, handle, depth - 1) for each in given])
        return handle(tag, given)
    except (TypeError, ValueError, IndexError, OverflowError):
        raise Broken from None


def sockets() -> list[socket.socket]:
    """Return the sockets that this process was started with, in its arguments: the limit of processor time, which it
    sets, and the numbers of the sockets."""
    cpu_s, *numbers = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    found = [socket.socket(fileno=number) for number in numbers]
    for each in found:
        each.set_inheritable(False)
    return found
