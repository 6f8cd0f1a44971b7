"""Import of objects that a setting names by a path (`package.module:name`, or `path/to/file.py:name`), and of optional
packages."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.config.invalid_settings import ConfigError

FILE_MODULE = "penstock_file_"
"""Prefix of the names of modules made from files; the file's own name and a hash of its path follow."""


class NoSuchName(ConfigError):
    """A file or module does not define the requested name; the message lists the names that it defines."""


def load(path: str) -> Any:
    """Return the object that `path` names, in a file, or in a module that is installed or in the working directory.
    Raises `NoSuchName`, and any exception of the user's module."""
    where, _, name = path.rpartition(":")
    if is_file(where):
        module = load_file(Path(where).absolute())
    else:
        import_from(Path.cwd())
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
    a package that cannot be imported, or if the parent is not a package."""
    if is_file(where):
        return Path(where).is_file()
    import_from(Path.cwd())
    return importlib.util.find_spec(where) is not None


def is_file(where: str) -> bool:
    """Return whether `where` names a file and not a module."""
    return where.endswith(".py")


@functools.cache
def load_file(file: Path) -> ModuleType:
    """Return the module made from `file`. The file can import its neighbours, as if it were run as a script."""
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


def import_named(key: str, path: str, *, wanted: str) -> Any:
    """Return the object that `path` names. `wanted` describes the values that `key` takes. Raises `ConfigError` for any
    error, including any exception of the user's module."""
    try:
        return load(path)
    except NoSuchName as error:
        raise ConfigError(f"{key} {path!r}: {error}") from None
    except Exception as error:
        raise ConfigError(
            f"{key} {path!r} cannot be imported: {type(error).__name__}: {error}; it names {wanted}, in a file or in a "
            "module that is installed or in the working directory"
        ) from error


def import_package(package: str, *, needed_by: str, install: str) -> Any:
    """Return an optional package. Raises `ConfigError` with the arguments for `pip install` if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.replace("_", "-")
        raise ConfigError(f"{needed_by} needs the package {name}: pip install {install}") from None
