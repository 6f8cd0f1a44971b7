"""What can go wrong behind a request, besides its being wrong itself. Torch-free."""

from __future__ import annotations


class EngineDead(RuntimeError):
    """The engine's thread has ended; `__cause__` says why."""


class Stopped(EngineDead):
    """The server is being shut down; another may answer."""


class GenerationFailed(RuntimeError):
    """The engine could not finish this request, though it serves on."""


class Conflict(ValueError):
    """The call does not fit the state of the transaction."""
