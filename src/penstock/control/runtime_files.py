"""JSON files in the runtime directory that only the run's user can read: the keys and the address of the control bus,
and the API keys of the rollout servers.

Two CURVE key pairs are made once per run. With one pair the controller proves that it belongs to the run. With the
other pair each joining process proves the same. Without the file of keys the bus stays within one machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import zmq


class RuntimeFile(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of such a file. A directory holds at most one file of each class."""

    FILE: ClassVar[str]

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Return the content of the file; None if it does not exist yet."""
        try:
            return msgspec.json.decode((directory / cls.FILE).read_bytes(), type=cls)
        except FileNotFoundError:
            return None

    def write(self, directory: Path) -> None:
        """Replace the file atomically. A concurrent reader gets the old content or the new one."""
        unfinished = directory / f".{self.FILE}.{os.getpid()}"
        with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self))
        unfinished.replace(directory / self.FILE)


class Address(RuntimeFile, frozen=True, kw_only=True):
    """The address of the controller's two sockets. The controller writes it to its runtime directory; the runtime
    directories on other machines hold copies. A restarted controller has another address."""

    FILE: ClassVar[str] = "controller.json"

    endpoint: str
    """Endpoint for requests: `tcp://host:port`."""
    broadcast: str


class Keys(RuntimeFile, frozen=True, kw_only=True):
    """The keys of a run as Z85 text, the encoding of ZeroMQ."""

    FILE: ClassVar[str] = "keys.json"

    controller: str
    """Public key of the controller."""
    controller_secret: str = ""
    """Empty except on the machine of the controller."""
    member: str
    """Public key of the members: all other processes of the run."""
    member_secret: str

    @classmethod
    def make(cls) -> Keys:
        """Make the keys of a new run."""
        controller, controller_secret, member, member_secret = (
            key.decode() for _ in range(2) for key in zmq.curve_keypair()
        )
        return cls(
            controller=controller, controller_secret=controller_secret, member=member, member_secret=member_secret
        )

    def of_members(self) -> Keys:
        """Return the keys for a machine without the controller: all except the controller's secret key."""
        return msgspec.structs.replace(self, controller_secret="")


class ServerKeys(RuntimeFile, frozen=True, kw_only=True):
    """The API keys of the run's rollout servers, for attached workers and for the user. Processes that the run starts
    get their keys in their environment."""

    FILE: ClassVar[str] = "server_keys.json"

    api_key: str
    admin_api_key: str
