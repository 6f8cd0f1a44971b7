"""The program of `code`, for Python tests in another sandbox (`remote_tests`): it answers their calls."""

from __future__ import annotations

import operator
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

from penstock.envs.rewards.remote_data import (
    BETWEEN,
    ERROR_CLASS,
    HANDLE,
    MODULE,
    Broken,
    decode,
    encode,
    receive,
    send,
    sockets,
)

PROGRAM = "program.py"


class Server:
    """Answers the calls of the tests."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._objects: list[Any] = []

    def run(self) -> None:
        """Load the program and answer until the tests end."""
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        with open(PROGRAM, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            exec(compile(file.read(), PROGRAM, "exec"), vars(module))
        names = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        send(self._pipe, {name: self._named(value) for name, value in names.items()})
        while True:
            request = receive(self._pipe)
            send(self._pipe, self._answer(request))

    def _answer(self, request: Any) -> Any:
        try:
            name, arguments, named = (decode(each, self._object) for each in request)
            return ["=", encode(OPERATIONS[name](*arguments, **named), self._handle)]
        except Exception as error:
            return ["!", *_described(error)]

    def _named(self, value: Any) -> Any:
        return [MODULE, value.__name__] if isinstance(value, types.ModuleType) else encode(value, self._handle)

    def _handle(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, Exception):
            return [ERROR_CLASS, [value.__name__, *_ancestry(value)]]
        self._objects.append(value)
        return [HANDLE, len(self._objects) - 1]

    def _object(self, tag: str, number: Any) -> Any:
        if tag != HANDLE:
            raise Broken
        return self._objects[number]


def _described(error: Exception) -> tuple[list[str], str]:
    try:
        return _ancestry(type(error)), str(error)[:1000]
    except Exception:
        return ["Exception"], ""


def _ancestry(kind: type) -> list[str]:
    return [each.__name__ for each in kind.__mro__]


def _call(function: Any, *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **named)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": _call,
    "getattr": getattr,
    "setattr": setattr,
    "getitem": operator.getitem,
    "setitem": operator.setitem,
    "delitem": operator.delitem,
    "len": len,
    "bool": bool,
    "iter": iter,
    "next": next,
    "str": str,
    "repr": repr,
    "isinstance": isinstance,
    **{name: getattr(operator, f"__{name}__") for name in BETWEEN},
}


if __name__ == "__main__":
    Server(*sockets()).run()
