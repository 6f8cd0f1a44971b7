"""Boxes for programs that a policy wrote."""

from penstock.sandbox.backends import (
    BACKENDS,
    SandboxUnavailable,
    confinement,
    open_box,
    python,
    run,
    select,
    why_not,
)
from penstock.sandbox.box import Box, BoxEnded, Program
from penstock.sandbox.limits import Limits, Outcome

__all__ = [
    "BACKENDS",
    "Box",
    "BoxEnded",
    "Limits",
    "Outcome",
    "Program",
    "SandboxUnavailable",
    "confinement",
    "open_box",
    "python",
    "run",
    "select",
    "why_not",
]
