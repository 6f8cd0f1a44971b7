"""Whether `env.options` are what a class takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from penstock.config import ConfigError


def check_options(name: str, made: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    """Raises `ConfigError` if `made` does not take `args` and `options`, whatever it would do with them."""
    try:
        signature = inspect.signature(made)
    except (TypeError, ValueError):  # some written in C have none
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        raise misfit(name, options, f"{error}; it is made with {signature}") from None


def misfit(name: str, options: dict[str, Any], reason: object) -> ConfigError:
    """What to raise then."""
    return ConfigError(f"env.options {options} do not fit {name}: {reason}")
