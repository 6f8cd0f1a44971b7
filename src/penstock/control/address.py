"""Where the controller listens, for those on other machines; a controller that was started again listens elsewhere."""

from __future__ import annotations

from typing import ClassVar

from penstock.control.runtime_file import RuntimeFile


class Address(RuntimeFile, frozen=True, kw_only=True):
    """Of its two sockets: in the runtime directory of the controller, which writes it, and in those on other
    machines."""

    FILE: ClassVar[str] = "controller.json"

    endpoint: str
    """For requests: `tcp://host:port`."""
    broadcast: str
    public_key: str
    """What the controller has to prove to own."""
