"""Refusals of commands: a message on stderr and an exit code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from penstock.observe.visible_text import visible
from penstock.redaction import redacted_text
from penstock.supervisor.child import leaf

P = ParamSpec("P")
REFUSAL = "error: "


class Refused(RuntimeError):
    """A command cannot do what the user asked for. The message gives the reason and the remedy."""

    self_explanatory = True


def refuse(reason: object, code: int) -> int:
    """Print the reason to stderr; return `code`."""
    print(visible(f"{REFUSAL}{redacted_text(str(reason))}"), file=sys.stderr)
    return code


def refusing(command: Callable[P, int]) -> Callable[P, int]:
    """Make a command print a self-explanatory error and return an exit code instead of raising. The exit code is the
    error's own (2 for `ConfigError`), or 1."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            cause = leaf(error)
            if not getattr(cause, "self_explanatory", False):
                raise
            return refuse(cause, getattr(cause, "exit_code", 1))

    return run
