"""What opens the control bus between machines: two CURVE key pairs, made once per run.

The controller proves that it is the run's with one; whoever joins proves with the other that he belongs to it. They lie
in a file of the runtime directory that only its owner reads. Where there is none, the bus does not leave the machine.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import zmq

FILE = "keys.json"
"""In the runtime directory."""


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Z85 text, as ZeroMQ takes it."""

    controller: str
    """Public."""
    controller_secret: str = ""
    """Empty but where the controller runs."""
    member: str
    """Public."""
    member_secret: str

    @classmethod
    def make(cls) -> Keys:
        """Of a new run."""
        (controller, controller_secret), (member, member_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(
            controller=controller.decode(),
            controller_secret=controller_secret.decode(),
            member=member.decode(),
            member_secret=member_secret.decode(),
        )

    @classmethod
    def read(cls, directory: Path) -> Keys | None:
        """None where the bus does not leave the machine."""
        try:
            return msgspec.json.decode((directory / FILE).read_bytes(), type=cls)
        except FileNotFoundError:
            return None

    def write(self, directory: Path) -> None:
        """For the processes whose runtime directory it is; whole or not at all."""
        unfinished = directory / f".{FILE}.{os.getpid()}"
        with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self))
        unfinished.replace(directory / FILE)

    def of_members(self) -> Keys:
        """What a machine needs that the controller does not run on."""
        return msgspec.structs.replace(self, controller_secret="")
