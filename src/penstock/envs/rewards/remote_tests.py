"""Python tests of a program in another sandbox (`remote_program`), which they call by a socket.

The tests call the program's functions by name. Objects of the program that are no plain data are seen through a
`Remote`. Two of them are compared by the program, but a `Remote` never equals a value of the tests, and no arithmetic
mixes them. So an object gains nothing by claiming to be equal to everything. The program never sees the tests, only the
arguments of its calls. The tests take from it only the names that they use and leave undefined, and never a built-in
one. If it lacks one of these, ends, breaks the protocol, or raises `SystemExit` or the like, the tests end at once,
without a verdict.

Tests that the code defines and does not run, as for pytest or unittest, run after it. The verdict is an empty text, or
says why the tests cannot judge a program.
"""

from __future__ import annotations

import ast
import builtins
import cmath
import contextlib
import functools
import importlib
import inspect
import os
import re
import socket
import symtable
import sys
import threading
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

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

T = TypeVar("T")

UNKNOWN_SETUP = ("setup_class", "setup_method", "setup_function", "setup_module")
"""Functions that only pytest calls."""


class Unusable(Exception):
    """The tests cannot judge a program."""


class Client:
    """Asks the program."""

    def __init__(self, pipe: socket.socket, tests: str) -> None:
        self._pipe = pipe
        named = {word.lower() for word in re.findall(r"nan\b|inf\b|infinity\b", tests, re.IGNORECASE)}
        self._takes_nan, self._takes_infinity = "nan" in named, bool({"inf", "infinity"} & named)
        self.asked = False

    def names(self) -> dict[str, Any]:
        """Return what the program defines, once it is loaded."""
        try:
            announced = receive(self._pipe)
            if not isinstance(announced, dict):
                raise Broken
            return {name: self._named(value) for name, value in announced.items()}
        except Broken:
            give_up()

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Return the result of an operation in the program, or raise its exception."""
        self.asked = True
        given = [operation, encode(list(arguments), _number), encode(named, _number)]
        try:
            send(self._pipe, given)
            answer = receive(self._pipe)
            if not isinstance(answer, list) or not answer:
                raise Broken
            if answer[0] == "=" and len(answer) == 2:
                return self.accepted(decode(answer[1], self._known))
            if answer[0] == "!" and len(answer) == 3 and isinstance(answer[1], list) and isinstance(answer[2], str):
                error = _raised(operation, _error_class(answer[1]), answer[2])
            else:
                raise Broken
        except (Broken, OSError):
            give_up()
        raise error

    def accepted(self, value: T) -> T:
        """Return a value of the program. End the tests if it holds a nan or an infinity, unless the tests name it: many
        comparisons with a tolerance accept these numbers."""
        if _has(value, self._is_refused):
            give_up()
        return value

    def _is_refused(self, number: complex) -> bool:
        return (cmath.isnan(number) and not self._takes_nan) or (cmath.isinf(number) and not self._takes_infinity)

    def _named(self, value: Any) -> Any:
        """Return what a name means. Only a name means a real module, so that no object of the program is one."""
        match value:
            case [tag, str(module)] if tag == MODULE:
                return importlib.import_module(module) if module in sys.stdlib_module_names else None
        return decode(value, self._known)

    def _known(self, tag: str, given: Any) -> Any:
        if tag == HANDLE and type(given) is int:
            return Remote(self, given)
        if tag == ERROR_CLASS and isinstance(given, list) and all(isinstance(each, str) for each in given):
            return _caught(_error_class(given[1:]))
        raise Broken


def _has(value: Any, test: Callable[[complex], bool]) -> bool:
    """Return whether a float or complex number in a value passes a test."""
    match value:
        case float() | complex():
            return test(value)
        case dict():
            return any(_has(each, test) for each in (*value, *value.values()))
        case list() | tuple() | set() | frozenset():
            return any(_has(each, test) for each in value)
    return False


_error_classes: dict[str, type[Exception]] = {}


def _error_class(ancestry: list[Any]) -> type[Exception]:
    """Return the class for an exception of the program: a built-in one, or one of its own made after its bases."""
    name = ancestry[0] if ancestry and isinstance(ancestry[0], str) else "Exception"
    found = getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    if isinstance(found, type) and issubclass(found, BaseException):
        give_up()
    if name not in _error_classes:
        base = _error_class(ancestry[1:])
        _error_classes[name] = type(name, (base,), {"__init__": lambda self, *args: Exception.__init__(self, *args)})
    return _error_classes[name]


class _Other(Exception):
    """What the tests get for a class of the program that is `AssertionError` or `Exception`: to catch it must not catch
    what the tests themselves raise."""


def _caught(kind: type[Exception]) -> type[Exception]:
    """Return the class for one that the tests name, perhaps to catch it."""
    return _Other if issubclass(AssertionError, kind) else kind


def _raised(operation: str, kind: type[Exception], text: str) -> Exception:
    """Return the exception of an operation. One that would silently end a loop of the tests becomes a `RuntimeError`,
    except at the end of an iterator of the program."""
    if issubclass(kind, StopAsyncIteration) or (issubclass(kind, StopIteration) and operation != "next"):
        return RuntimeError(f"the program raised {kind.__name__}: {text}")
    return kind(text)


def give_up() -> NoReturn:
    """End the tests without a verdict."""
    os._exit(1)


def _number(value: Any) -> Any:
    if isinstance(value, Remote):
        return [HANDLE, object.__getattribute__(value, "_number")]
    raise TypeError(f"a {type(value).__name__} cannot be passed to the program: only plain data can")


class Remote:
    """An object of the program, as the tests see it."""

    def __init__(self, client: Client, number: int) -> None:
        object.__setattr__(self, "_client", client)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", key, value)

    def __delitem__(self, key: Any) -> None:
        _ask(self, "delitem", key)

    def __len__(self) -> int:
        return _typed(_ask(self, "len"), int)

    def __bool__(self) -> bool:
        return _typed(_ask(self, "bool"), bool)

    def __iter__(self) -> Any:
        return _ask(self, "iter")

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __reversed__(self) -> Any:
        for index in range(len(self) - 1, -1, -1):
            try:
                yield self[index]
            except IndexError as error:  # Python's own `reversed` would end here
                raise RuntimeError(f"the program has no item {index}: {error}") from None

    def __str__(self) -> str:
        return _typed(_ask(self, "str"), str)

    def __repr__(self) -> str:
        return _typed(_ask(self, "repr"), str)

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and _typed(_ask(value, "isinstance", self), bool)

    def __enter__(self) -> Any:
        return _ask_method(self, "__enter__")

    def __exit__(self, *_: object) -> None:
        """Never hide an exception of the tests, whatever the program answers."""
        _ask_method(self, "__exit__", None, None, None)


def _ask(remote: Remote, operation: str, *arguments: Any, **named: Any) -> Any:
    return object.__getattribute__(remote, "_client").ask(operation, remote, *arguments, **named)


def _ask_method(remote: Remote, name: str, *arguments: Any) -> Any:
    return _ask(remote, "getattr", name)(*arguments)


def _typed(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"the program gives a {type(value).__name__}, not a {kind.__name__}")
    return value


def _between(name: str) -> Callable[[Remote, Any], Any]:
    """Return a method for an operator between two objects of the program. With a value of the tests there is none, so
    that equality with one is False."""

    def operate(self: Remote, other: Any) -> Any:
        return _ask(self, name, other) if isinstance(other, Remote) else NotImplemented

    return operate


for _name in BETWEEN:
    setattr(Remote, f"__{_name}__", _between(_name))


def namespace(tests: str, program: dict[str, Any]) -> dict[str, Any]:
    """Return the names that the tests take from the program. They end at once if it lacks one. A name of a standard
    module with a dot after it means that module, whatever the program defines. Raises `Unusable` if they take none."""
    wanted, modules = _free_names(tests), _before_dots(tests) & sys.stdlib_module_names
    defined = {name: value for name, value in program.items() if not _is_alias(name, value)}
    if not wanted:
        raise Unusable("use no name of the program (a built-in name is none)")
    if not wanted <= defined.keys():
        give_up()
    return {name: importlib.import_module(name) if name in modules else defined[name] for name in wanted}


def _free_names(tests: str) -> set[str]:
    """Return the global names that the tests use without defining or importing them, except built-in ones."""
    used, bound = set[str](), {*dir(builtins), *_star_imports(tests)}
    tables = [symtable.symtable(tests, "tests", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in filter(symtable.Symbol.is_global, table.get_symbols()):
            (bound if symbol.is_assigned() or symbol.is_imported() else used).add(symbol.get_name())
    return {name for name in used - bound if not name.startswith("__")}


def _star_imports(tests: str) -> set[str]:
    """Return the names that statements `from ... import *` of the tests bind."""
    names: dict[str, Any] = {}
    for node in ast.walk(ast.parse(tests)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            with contextlib.suppress(ImportError):
                exec(ast.unparse(node), names)
    return set(names)


def _before_dots(tests: str) -> set[str]:
    attributes = [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Attribute)]
    return {node.value.id for node in attributes if isinstance(node.value, ast.Name)}


def _is_alias(name: str, value: Any) -> bool:
    """Return whether a name of the program means a module of another name."""
    return isinstance(value, types.ModuleType) and value.__name__ != name


def _reads_value(tests: str, taken: dict[str, Any]) -> bool:
    """Return whether the tests use a value of the program outside functions, where they need not ask for it."""
    values = {name for name, value in taken.items() if not isinstance(value, (Remote, type, types.ModuleType))}
    return not values.isdisjoint(symtable.symtable(tests, "tests", "exec").get_identifiers())


def _run(tests: str, module: types.ModuleType) -> set[types.CodeType]:
    """Run the tests. Return the code of the functions `test...` among them that ran."""
    tree, ran = ast.parse(tests), set[types.CodeType]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            node.body[:0] = ast.parse("__ran__()").body
    vars(module)["__ran__"] = lambda: ran.add(sys._getframe(1).f_code)
    try:
        exec(compile(ast.fix_missing_locations(tree), "tests", "exec"), vars(module))
    except SystemExit as end:
        line = end.__traceback__.tb_next.tb_lineno  # type: ignore[union-attr]
        if end.code is not False and (end.code or line < tree.body[-1].lineno):  # unittest.main() ends with False
            give_up()
    return ran


def _not_run(module: types.ModuleType, ran: set[types.CodeType]) -> Iterator[Callable[[], Any]]:
    """Yield the tests that a module defines and that did not run, as pytest and unittest find them."""
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    for kind in classes:
        names = [name for name in dir(kind) if _is_test(getattr(kind, name, None), ran)]
        if issubclass(kind, unittest.TestCase):
            yield functools.partial(unittest.TestSuite(map(kind, names)).run, unittest.TestResult())
        elif kind.__name__.startswith("Test"):
            yield from (_plain(getattr(kind(), name), vars(kind)) for name in names)
    yield from (_plain(each, vars(module)) for each in list(vars(module).values()) if _is_test(each, ran))


def _is_test(value: Any, ran: set[types.CodeType]) -> bool:
    code = getattr(inspect.unwrap(value), "__code__", None) if inspect.isfunction(value) else None
    return code is not None and code.co_filename == "tests" and code.co_name.startswith("test") and code not in ran


def _plain(test: Callable[..., Any], around: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a test that needs no pytest. Raises `Unusable`."""
    needed = inspect.signature(test, follow_wrapped=False).parameters.values()
    if any(each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in needed):
        raise Unusable(f"do not run {test.__name__}, which takes arguments: call it, because fixtures need pytest")
    if inspect.iscoroutinefunction(test) or inspect.isgeneratorfunction(test):
        raise Unusable(f"do not run {test.__name__}, which is async or a generator: run it")
    if unknown := [name for name in UNKNOWN_SETUP if name in around]:
        raise Unusable(f"define {unknown[0]} for {test.__name__}: call it there, because only pytest does so")
    return test


def _watched(run: Callable[..., unittest.TestResult | None]) -> Callable[..., unittest.TestResult | None]:
    """Return a method `run` of unittest that ends the tests at a failure, whatever they do with the result."""

    def watched(self: Any, *arguments: Any, **named: Any) -> unittest.TestResult | None:
        result = run(self, *arguments, **named)
        if result is not None and not result.wasSuccessful():
            give_up()
        return result

    return watched


def _judge(tests: str, client: Client) -> None:
    """Run the tests. Returns if they pass. Raises `Unusable`."""
    taken = client.accepted(namespace(tests, client.names()))
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    vars(module).update(taken)
    for each in list(_not_run(module, _run(tests, module))):
        each()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for all threads
    if not client.asked and not _reads_value(tests, taken):
        if any(isinstance(value, type) and issubclass(value, BaseException) for value in taken.values()):
            give_up()  # an exception in the place of a function
        raise Unusable("never ask the program for anything: call its functions")


def check(control: socket.socket, pipe: socket.socket) -> None:
    """Run the tests that arrive on `control`, and send the verdict there. Send none if they fail."""
    sys.argv = ["tests"]
    threading.excepthook = lambda _: give_up()
    unittest.TestCase.run = _watched(unittest.TestCase.run)  # type: ignore[method-assign]
    unittest.TestSuite.run = _watched(unittest.TestSuite.run)  # type: ignore[method-assign, assignment]
    fault = ""
    try:
        tests = receive(control)
        _judge(tests, Client(pipe, tests))
    except Unusable as error:
        fault = str(error)
    send(control, fault)


if __name__ == "__main__":
    program, verdict = sockets()
    check(verdict, program)
