"""Read a pickle as plain data: names stay names, and calls stay descriptions of calls.

Python's own reader imports the names of a pickle and calls them. This reader does neither, so a pickle cannot run code.
It knows only the instructions that the pickles of tensor handles consist of, and only the names that its caller admits.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_INSTRUCTIONS = 2**20
"""Maximum number of instructions of one pickle. A tensor needs about 50."""
MAX_SHOWN = 100
"""Number of characters of a name that an error repeats."""
LITERALS = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
    | {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"}
)
"""Instructions that push their argument."""
CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
SHORT_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Name(NamedTuple):
    """The name of a class, a function or a value."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:MAX_SHOWN]


@dataclass(slots=True, eq=False)
class Call:
    """A call, or a new object of a class, that the pickle describes. The same object in two places is one `Call`."""

    target: Name
    args: tuple[Any, ...]
    state: dict[str, Any] | None = None
    """The attributes of a new object."""


def read_pickle(data: bytes, check_name: Callable[[Name], None]) -> Any:
    """Return the value of a pickle, made of plain values, lists, tuples, dicts with text keys, `Name` and `Call`.

    `check_name` raises ValueError for a name that is not admitted. Raises ValueError for any other pickle too."""
    machine = _Machine(check_name)
    try:
        for count, (instruction, argument, _) in enumerate(_instructions(data)):
            if count >= MAX_INSTRUCTIONS:
                raise _Malformed(f"it has more than {MAX_INSTRUCTIONS} instructions")
            machine.execute(instruction.name, argument)
        return machine.pop()
    except (_Malformed, IndexError, KeyError) as error:
        raise ValueError(f"the pickle cannot be read: {error}") from None


class _Malformed(Exception):
    """The pickle is not one of tensor handles."""


def _instructions(data: bytes) -> Iterator[tuple[pickletools.OpcodeInfo, Any, int | None]]:
    try:
        yield from pickletools.genops(data)
    except ValueError as error:
        raise _Malformed(str(error)[:MAX_SHOWN]) from None


class _Machine:
    def __init__(self, check_name: Callable[[Name], None]) -> None:
        self._check_name = check_name
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def pop(self, kind: type[Any] = object) -> Any:
        """Remove the top of the stack and return it. It must be a `kind`."""
        return self._expect(self._stack.pop(), kind)

    def _top(self, kind: type[Any]) -> Any:
        return self._expect(self._stack[-1], kind)

    def _expect(self, value: Any, kind: type[Any]) -> Any:
        if not isinstance(value, kind):
            raise _Malformed(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
        return value

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        found = self._stack[start:]
        del self._stack[start:]
        return found

    def execute(self, instruction: str, argument: Any) -> None:
        """Execute one instruction."""
        stack, memo = self._stack, self._memo
        if instruction in LITERALS:
            stack.append(argument)
        elif instruction in CONSTANTS:
            stack.append(CONSTANTS[instruction]())
        elif instruction in SHORT_TUPLES:
            stack.append(tuple(reversed([self.pop() for _ in range(SHORT_TUPLES[instruction])])))
        else:
            match instruction:
                case "PROTO" | "FRAME" | "STOP":
                    pass
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "MARK":
                    self._marks.append(len(stack))
                case "TUPLE":
                    stack.append(tuple(self._since_mark()))
                case "APPEND" | "APPENDS":
                    values = self._since_mark() if instruction == "APPENDS" else [stack.pop()]
                    self._top(list).extend(values)
                case "SETITEM" | "SETITEMS":
                    values = self._since_mark() if instruction == "SETITEMS" else [stack.pop(-2), stack.pop()]
                    # Only text is a key: to hash a deeply nested tuple could overflow the stack of the process.
                    keys = [self._expect(key, str) for key in values[::2]]
                    if len(values) % 2:
                        raise _Malformed("a key has no value")
                    self._top(dict).update(zip(keys, values[1::2], strict=True))
                case "GLOBAL":
                    self._push_name(*argument.split(" ", 1))
                case "STACK_GLOBAL":
                    name, module = self.pop(str), self.pop(str)
                    self._push_name(module, name)
                case "REDUCE" | "NEWOBJ":
                    args, target = self.pop(tuple), self.pop(Name)
                    stack.append(Call(target, args))
                case "BUILD":
                    state = self.pop(dict)
                    self._top(Call).state = state
                case _:
                    raise _Malformed(f"handles of tensors need no instruction {instruction}")

    def _push_name(self, module: str, name: str) -> None:
        found = Name(module, name)
        self._check_name(found)
        self._stack.append(found)
