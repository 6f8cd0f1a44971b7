"""Discovery of environment classes in files, from syntax trees: nothing is imported and nothing runs."""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import ConfigError
from penstock.own_files import open_plain

PLAIN_BASES = ("object", "Protocol", "ABC")
"""Base classes that do not change how a class is constructed."""
UNPARSABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of reading and parsing a file. Deep nesting raises the last two."""
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
MAX_SOURCE_BYTES = 2**20
"""Largest file that is parsed: its syntax tree takes hundreds of times as much memory."""
SKIPPED = ("__pycache__", "site-packages", "node_modules")
"""Folders that are not searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentClass:
    """A class that looks like an environment."""

    class_name: str
    file: Path
    description: str
    """First line of the class's docstring."""

    @property
    def name(self) -> str:
        """Return the `env.name` that selects this class."""
        return f"{self.file}:{self.class_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A file that cannot be read or parsed as Python."""

    file: Path
    reason: str


def discover(directory: Path) -> Iterator[EnvironmentClass | Unreadable]:
    """Yield all environment classes and unreadable files below `directory`. Hidden and installed files are skipped."""
    for folder, subfolders, files in os.walk(directory):
        subfolders[:] = sorted(name for name in subfolders if _is_source(Path(folder, name)))
        for name in sorted(files):
            if name.endswith(".py"):
                yield from read_file(Path(folder, name))


def read_file(file: Path) -> list[EnvironmentClass | Unreadable]:
    """Return the environment classes of one file, or one `Unreadable`."""
    try:
        classes = {node.name: node for node in _statements(file) if isinstance(node, ast.ClassDef)}
        return [
            EnvironmentClass(class_name=name, file=file, description=(ast.get_docstring(node) or "").partition("\n")[0])
            for name, node in classes.items()
            if not name.startswith("_") and _plays(node, classes)
        ]
    except UNPARSABLE as error:
        return [Unreadable(file=file, reason=f"{type(error).__name__}: {error}")]


def defines(file: Path, class_name: str) -> bool:
    """Return whether `file` defines a class of this name, or imports this name with `from ... import`."""
    nodes = _parsed(file)
    imported = (alias for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names)
    names = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    return class_name in names | {alias.asname or alias.name for alias in imported}


def is_function(file: Path, name: str) -> bool:
    """Return whether `name` is a function of that file."""
    return any(isinstance(node, _FUNCTIONS) and node.name == name for node in _parsed(file))


def declares(file: Path, name: str, attribute: str, *, value: bool = True) -> bool:
    """Return whether class `name` of `file`, or a base of it there, sets `attribute` to `value`; or whether the file
    sets it on the function `name`."""
    body = _body(file, name)
    names = {f"{name}.{attribute}"} if body is None else {attribute, f"{attribute}: bool"}
    written = {ast.unparse(node) for node in body or _parsed(file) if isinstance(node, ast.Assign | ast.AnnAssign)}
    return bool(written & {f"{each} = {value}" for each in names})


def is_coroutine(file: Path, name: str) -> bool:
    """Return whether `name` is an `async` function of that file, or a class there with an `async` `score`."""
    body = _body(file, name)
    wanted, nodes = (name, _parsed(file)) if body is None else ("score", body)
    return any(isinstance(node, ast.AsyncFunctionDef) and node.name == wanted for node in nodes)


def _body(file: Path, name: str) -> list[ast.stmt] | None:
    """Return the statements of class `name` and of its bases in the file; None if the file has no such class."""
    classes = {node.name: node for node in _parsed(file) if isinstance(node, ast.ClassDef)}
    return [item for node in _lineage(classes[name], classes) for item in node.body] if name in classes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Named arguments that a class or function takes, according to its source."""

    line: int
    """Line of the class or function in its file."""
    names: tuple[str, ...]
    required: frozenset[str]
    """Names without a default."""
    has_foreign_base: bool
    """A base class is defined in another file."""


def parameters_of(file: Path, name: str) -> Parameters | None:
    """Return the parameters of the class or function `name` in `file`. None if the source alone cannot tell, because of
    `*args`, `**options`, an imported name, a decorator, or a class without a constructor in this file."""
    nodes = {n.name: n for n in _parsed(file) if isinstance(n, ast.ClassDef | _FUNCTIONS)}
    node = nodes.get(name)
    if node is None or node.decorator_list:
        return None
    if not isinstance(node, ast.ClassDef):
        return _parameters(node.args, node.lineno, has_foreign_base=False)
    classes = {name: each for name, each in nodes.items() if isinstance(each, ast.ClassDef)}
    lineage = list(_lineage(node, classes))
    has_foreign_base = any(_is_foreign(base, classes) for each in lineage for base in each.bases)
    for each in lineage:
        made = {item.name: item for item in each.body if isinstance(item, _FUNCTIONS)}
        if each.keywords or each.decorator_list or "__new__" in made:
            return None
        if (init := made.get("__init__")) is not None:
            own = (init.args.posonlyargs or init.args.args)[:1]
            return _parameters(init.args, node.lineno, has_foreign_base=has_foreign_base, bound=own)
        if has_foreign_base:
            return None
    return None


def _parsed(file: Path) -> list[ast.stmt]:
    """Return the statements of `file`. Raises `ConfigError` if it cannot be read or is not valid Python."""
    try:
        return _statements(file)
    except UNPARSABLE as error:
        raise ConfigError(f"{file} cannot be read: {type(error).__name__}: {error}") from None


def _statements(file: Path) -> list[ast.stmt]:
    """Return the statements of `file`, or of the file that it is a link to. Raises one of `UNPARSABLE` if it is no
    plain file, too large, or not valid Python."""
    with open_plain(Path(os.path.realpath(file))) as opened:
        source = opened.read(MAX_SOURCE_BYTES + 1)
    if len(source) > MAX_SOURCE_BYTES:
        raise ValueError(f"it has more than {MAX_SOURCE_BYTES} bytes")
    with warnings.catch_warnings(action="ignore"):  # a warning would print text of the file
        return ast.parse(source, filename=str(file)).body


def _parameters(
    given: ast.arguments, line: int, *, has_foreign_base: bool, bound: Sequence[ast.arg] = ()
) -> Parameters | None:
    """Return the parameters of a signature; None if it has `*args` or `**options`. `bound`: arguments that Python fills
    in, like `self`."""
    if given.kwarg is not None or given.vararg is not None:
        return None
    positional = [*given.posonlyargs, *given.args]
    with_default = {each.arg for each in positional[len(positional) - len(given.defaults) :]}
    with_default |= {each.arg for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default}
    names = [each.arg for each in (*positional, *given.kwonlyargs) if each not in bound]
    required = frozenset(names) - with_default
    return Parameters(line=line, names=tuple(names), required=required, has_foreign_base=has_foreign_base)


def _lineage(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """Yield the class and its bases in the same file, each once, nearest first."""
    found: dict[str, ast.ClassDef] = {}
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each.name in found:
            continue
        found[each.name] = each
        names = [base.id for base in each.bases if isinstance(base, ast.Name)]
        waiting += [classes[name] for name in reversed(names) if name in classes]
        yield each


def _is_foreign(base: ast.expr, classes: dict[str, ast.ClassDef]) -> bool:
    return not (isinstance(base, ast.Name) and (base.id in classes or base.id in PLAIN_BASES))


def _plays(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Return whether the class has the methods of an environment or an agent, also from its bases in the same file. A
    protocol has none, because it only declares methods."""
    lineage = (each for each in _lineage(node, classes) if "Protocol" not in map(ast.unparse, each.bases))
    methods = {item.name for each in lineage for item in each.body if isinstance(item, _FUNCTIONS)}
    return "play" in methods or {"reset", "step"} <= methods


def _is_source(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in SKIPPED
    return not hidden and not (folder / "pyvenv.cfg").exists()
