"""A free port, for tests."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port for a server that starts later. It is below those that the system gives to outgoing connections, so
    no client of another test takes it meanwhile."""
    while True:
        port = random.randrange(20_000, 32_768)
        with suppress(OSError), socket.create_server((host, port)):
            return port
