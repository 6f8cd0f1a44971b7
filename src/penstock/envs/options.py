"""Checks that a class or function accepts its configured options."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.config import ConfigError
from penstock.config.imports import find, is_file, is_there
from penstock.envs.discovery import parameters_of
from penstock.redaction import redacted


def check_options(name: str, made: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """Raise `ConfigError` if the signature of `made` does not accept `args` and `options`."""
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):  # some callables written in C have no signature
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        raise misfit(name, options, f"{error}; it is made with {signature}") from None


def check_written(
    key: str, where: tuple[str, str], options: Mapping[str, Any], *, num_given: int, extra: Collection[str] = ()
) -> None:
    """Raise `ConfigError` if the source of a class or function shows that it does not accept `options`. Nothing is
    imported. `key`: the setting that holds the options. `where`: (file or module, name in it). `num_given`: number of
    leading arguments that the run itself passes. `extra`: options of the adapter, allowed if a base class is defined in
    another file."""
    file = source_of(where[0])
    found = parameters_of(file, where[1]) if file is not None else None
    if file is None or found is None:
        return
    given, place = found.names[:num_given], f"{where[1]} ({file.name}, line {found.line})"
    known = [each for each in found.names if each not in given or found.has_foreign_base]
    known += extra if found.has_foreign_base else ()
    for option in options:
        if option not in known:
            there = f"its options are {', '.join(known)}" if known else "it has no options"
            raise ConfigError(f"{key}.{option}: {place} has no such option; {suggestion(option, known, there, key)}")
    if missing := [each for each in found.names[num_given:] if each in found.required and each not in options]:
        raise ConfigError(f"{key}: {place} needs {', '.join(missing)}: set {key}.{missing[0]}")


def suggestion(name: str, known: Iterable[str], otherwise: str, key: str = "") -> str:
    """Return the question whether the most similar `known` name was meant; `otherwise` if none is similar. `key`: the
    setting that the names belong to."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {key}{key and '.'}{near[0]}?" if near else otherwise


def check_exists(key: str, name: str, where: str) -> None:
    """Raise `ConfigError` if there is no file or module `where`, to which the value `name` of the setting `key` refers.
    Nothing is imported."""
    try:
        found = is_there(where)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{key} {name!r}: {error}") from None
    if not found:
        module = f"module {where} here or among the installed packages"
        missing = f"file {Path(where).absolute()}" if is_file(where) else module
        raise ConfigError(f"{key} {name!r}: there is no {missing}")


def source_of(where: str) -> Path | None:
    """Return the Python file of a file name or module name. None if there is no file to read. Only the packages that
    contain the module are imported."""
    if is_file(where):
        return Path(where)
    spec = find(where)
    return Path(spec.origin) if spec is not None and spec.origin is not None and is_file(spec.origin) else None


def misfit(name: str, options: dict[str, Any], reason: object) -> ConfigError:
    """Return the `ConfigError` for options that do not fit."""
    return ConfigError(f"env.options {redacted(options)} do not fit {name}: {reason}")
