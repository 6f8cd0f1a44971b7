"""What a setting names by its import path: `package.module:name`, or `path/to/file.py:name`."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.config.errors import ConfigError

FILE_MODULE = "penstock_file_"
"""What modules made from files are called, before their file's own name and a hash of where it lies."""


class NoSuchName(ConfigError):
    """A file or module has nothing of that name; the message says what it has."""


def load(path: str) -> Any:
    """What `path` names, in a file, or in a module that is installed or in the working directory. Raises `NoSuchName`,
    and whatever goes wrong in the user's module."""
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
    """Classes and functions of its own."""
    own = (name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return [name for name in own if not name.startswith("_")]


def is_there(where: str) -> bool:
    """Whether there is such a file or module; it is not imported. Raises ImportError or ValueError for a module in a
    package that cannot be imported, or that is none."""
    if is_file(where):
        return Path(where).is_file()
    import_from(Path.cwd())
    return importlib.util.find_spec(where) is not None


def is_file(where: str) -> bool:
    """Whether that is a file, not a module."""
    return where.endswith(".py")


@functools.cache
def load_file(file: Path) -> ModuleType:
    """As a module of its own; what lies beside it can be imported, as if it were run as a script."""
    import_from(file.parent)
    place = hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()
    spec = importlib.util.spec_from_file_location(f"{FILE_MODULE}{file.stem}_{place}", file)
    assert spec is not None and spec.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def import_from(directory: Path) -> None:
    """It counts as a place to import from."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def import_named(key: str, path: str, *, wanted: str) -> Any:
    """What `path` names. `wanted` says what `key` takes. Raises `ConfigError`, whatever goes wrong in the user's
    module."""
    try:
        return load(path)
    except NoSuchName as error:
        raise ConfigError(f"{key} {path!r}: {error}") from None
    except Exception as error:
        raise ConfigError(
            f"{key} {path!r} cannot be imported: {type(error).__name__}: {error}; it names {wanted}, in a module that "
            "is installed or in the working directory"
        ) from error
