"""Import of objects that a setting names by a path (`package.module:name`, or `path/to/file.py:name`), and of optional
packages."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.config.invalid_settings import ConfigError

MATPLOTLIB = "matplotlibrc"
"""Settings that matplotlib, and packages that import it, read from the working directory."""
FILE_MODULE = "penstock_file_"
"""Prefix of the names of modules made from files; the file's own name and a hash of its path follow."""


class NoSuchName(ConfigError):
    """A file or module does not define the requested name; the message lists the names that it defines."""


def load(path: str) -> Any:
    """Return the object that `path` names, in a file, or in a module that is installed or in the working directory.
    Raises `NoSuchName`, `ConfigError` as `check_closed` does, and any exception of the user's module."""
    where, _, name = path.rpartition(":")
    if is_file(where):
        module = load_file(Path(where).absolute())
    else:
        _look_here(where)
        module = importlib.import_module(where)
    if not hasattr(module, name):
        raise NoSuchName(f"{where} has no {name}; there are {', '.join(_defined(module)) or 'none'}")
    return getattr(module, name)


def _defined(module: ModuleType) -> list[str]:
    """Return the names of the public classes and functions that `module` defines itself."""
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return [name for name in own if not name.startswith("_")]


def is_there(where: str) -> bool:
    """Return whether the file or module exists, without importing it. Raises ImportError or ValueError for a module in
    a package that cannot be imported, or if the parent is not a package, and `ConfigError` as `check_closed` does."""
    if not is_file(where):
        return find(where) is not None
    file = Path(where).absolute()
    if file.is_file():
        check_closed(file.parent, is_named=True)
    return file.is_file()


def find(where: str) -> ModuleSpec | None:
    """Return what the import system knows of a module that is installed or in the working directory; None if there is
    none. Only the packages that contain the module are imported."""
    _look_here(where)
    return importlib.util.find_spec(where)


def _look_here(where: str) -> None:
    """Add the working directory to the import path if the module is there. Otherwise no file there is imported."""
    package = where.partition(".")[0]
    if package not in sys.modules and PathFinder.find_spec(package, [str(Path.cwd())]) is not None:
        check_closed(Path.cwd())
        import_from(Path.cwd())


def is_file(where: str) -> bool:
    """Return whether `where` names a file and not a module."""
    return where.endswith(".py")


@functools.cache
def load_file(file: Path) -> ModuleType:
    """Return the module made from `file`. The file can import its neighbours, as if it were run as a script."""
    check_closed(file.parent, is_named=True)
    import_from(file.parent)
    place = hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{FILE_MODULE}{file.stem}_{place}", file)
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def import_from(directory: Path) -> None:
    """Add `directory` to the front of the import path, unless it is there."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def check_closed(directory: Path, *, is_named: bool = False) -> None:
    """Raise `ConfigError` if another user than root could have put a file into `directory`, which an import would
    run. `is_named`: the user names a file there, so its owner is trusted, but not every user of the machine."""
    found = directory.stat()
    is_foreign = not is_named and found.st_uid not in (0, os.geteuid())
    if is_foreign or found.st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        problem = f"belongs to another user ({found.st_uid})" if is_foreign else "can be written to by every user"
        raise ConfigError(
            f"{directory} {problem}, who could run any program as you: import from a directory of your own "
            f"(chown {os.geteuid()}, chmod o-w), and start penstock there"
        )


@contextmanager
def away_from_foreign(*names: str) -> Iterator[None]:
    """Leave the working directory during the body if another user put a file with one of these names there. A package
    reads its settings from such a file of any user, and waits for ever if it is a pipe."""
    if all(_may_be_read(Path(name)) for name in names):
        yield
        return
    with chdir("/"):
        yield


def _may_be_read(file: Path) -> bool:
    """Return whether a package may read a file: it is missing, or a plain file of our user or of root, and so are the
    directories above it."""
    try:
        found = file.lstat()
    except OSError:
        return True
    is_kind = stat.S_ISREG(found.st_mode) or (stat.S_ISDIR(found.st_mode) and file.name != MATPLOTLIB)
    is_trusted = is_kind and found.st_uid in (0, os.geteuid()) and not found.st_mode & stat.S_IWOTH
    return is_trusted and (file.parent == Path() or _may_be_read(file.parent))


def import_named(key: str, path: str, *, wanted: str) -> Any:
    """Return the object that `path` names. `wanted` describes the values that `key` takes. Raises `ConfigError` for any
    error, including any exception of the user's module."""
    try:
        return load(path)
    except ConfigError as error:
        raise ConfigError(f"{key} {path!r}: {error}") from None
    except Exception as error:
        raise ConfigError(
            f"{key} {path!r} cannot be imported: {type(error).__name__}: {error}; it names {wanted}, in a file or in a "
            "module that is installed or in the working directory"
        ) from error


def import_package(package: str, *, needed_by: str, install: str) -> Any:
    """Return an optional package. Raises `ConfigError` with the arguments for `pip install` if it is missing."""
    try:
        with away_from_foreign(MATPLOTLIB):
            return importlib.import_module(package)
    except ImportError:
        name = package.replace("_", "-")
        raise ConfigError(f"{needed_by} needs the package {name}: pip install {install}") from None
