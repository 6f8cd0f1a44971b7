"""Where the controller listens, for those on other machines; a controller that was started again listens elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

FILE = "controller.json"
"""In the runtime directory of the controller, which writes it, and in those on other machines."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Of its two sockets."""

    endpoint: str
    """For requests: `tcp://host:port`."""
    broadcast: str
    public_key: str
    """What the controller has to prove to own."""

    @classmethod
    def read(cls, directory: Path) -> Address | None:
        """None as long as no controller is known there."""
        try:
            return msgspec.json.decode((directory / FILE).read_bytes(), type=cls)
        except FileNotFoundError:
            return None

    def write(self, directory: Path) -> None:
        """Whoever reads meanwhile reads the one before."""
        unfinished = directory / f".{FILE}.{os.getpid()}"
        unfinished.write_bytes(msgspec.json.encode(self))
        unfinished.replace(directory / FILE)
