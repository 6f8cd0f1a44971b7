"""What opens the control bus between machines: two CURVE key pairs, made once per run.

The controller proves that it is the run's with one; whoever joins proves with the other that he belongs to it. They lie
in a file of the runtime directory that only its owner reads. Where there is none, the bus does not leave the machine.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import zmq

from penstock.control.runtime_file import RuntimeFile


class Keys(RuntimeFile, frozen=True, kw_only=True):
    """Z85 text, as ZeroMQ takes it."""

    FILE: ClassVar[str] = "keys.json"

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

    def of_members(self) -> Keys:
        """What a machine needs that the controller does not run on."""
        return msgspec.structs.replace(self, controller_secret="")
