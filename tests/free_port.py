"""A free port, for tests."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port for a server that starts later. It is below those that the system gives to outgoing connections, so
    no client of another test takes it meanwhile. It does not depend on the seed of `random`, which some tests set."""
    while True:
        port = 20_000 + secrets.randbelow(12_768)
        with suppress(OSError), socket.create_server((host, port)):
            return port
