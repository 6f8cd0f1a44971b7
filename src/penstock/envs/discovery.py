"""Environment classes in files, found by reading their syntax trees: nothing is imported, nothing runs."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED = ("__pycache__", "site-packages", "node_modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentClass:
    """A class that looks like an environment."""

    class_name: str
    file: Path
    description: str
    """First line of its docstring."""

    @property
    def name(self) -> str:
        """What `env.name` would be."""
        return f"{self.file}:{self.class_name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A file that is no Python we can read."""

    file: Path
    reason: str


def discover(directory: Path) -> Iterator[EnvironmentClass | Unreadable]:
    """Everything below `directory`, hidden and installed files aside."""
    for folder, subfolders, files in os.walk(directory):
        subfolders[:] = sorted(name for name in subfolders if _is_source(Path(folder, name)))
        for name in sorted(files):
            if name.endswith(".py"):
                yield from read_file(Path(folder, name))


def read_file(file: Path) -> list[EnvironmentClass | Unreadable]:
    """The environment classes of one file."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (OSError, SyntaxError, ValueError) as error:
        return [Unreadable(file=file, reason=f"{type(error).__name__}: {error}")]
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return [
        EnvironmentClass(class_name=name, file=file, description=_first_line(node))
        for name, node in classes.items()
        if not name.startswith("_") and _plays(_methods(node, classes))
    ]


def defines(file: Path, class_name: str) -> bool:
    """Whether a file that can be read has such a class, of its own or imported from elsewhere."""
    names: set[str] = set()
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return class_name in names


def _plays(methods: set[str]) -> bool:
    return "play" in methods or {"reset", "step"} <= methods


def _methods(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Its own, and those of its bases in the same file; those of a protocol are only promised."""
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    if "Protocol" in bases:
        return set()
    found = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    for base in bases:
        if base in classes and classes[base] is not node:
            found |= _methods(classes[base], {name: each for name, each in classes.items() if name != base})
    return found


def _first_line(node: ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _is_source(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in SKIPPED
    return not hidden and not (folder / "pyvenv.cfg").exists()
