"""What a setting names by its import path: `package.module:name`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from penstock.config.errors import ConfigError


def import_named(key: str, path: str, *, wanted: str) -> Any:
    """What `path` names, in a module that is installed or in the working directory. `wanted` says what `key` takes.
    Raises `ConfigError`, whatever goes wrong in the user's module."""
    module_name, _, name = path.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise ConfigError(
            f"{key} {path!r} cannot be imported: {type(error).__name__}: {error}; it names {wanted}, in a module that "
            "is installed or in the working directory"
        ) from error
