"""Keep the port of a server for this user, over the server's restarts. Torch-free, and without the HTTP server.

The kernel lets a further socket bind a port with `SO_REUSEPORT` only if the same user owns all sockets that are bound
to it. So a held port can be taken by no other user, also while its server is dead. A socket that does not listen gets
no connections: the kernel refuses clients of a dead server at once.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

TRIES = 20
"""Ports that the system chooses until one is free in both families."""
WITHOUT_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


class HeldPort:
    """A port that is kept until `close`. The server binds it with `http_server.bind`."""

    def __init__(self, host: str, port: int) -> None:
        """Hold `port`; 0 lets the system choose. Raises OSError if it is taken, also by another process of this
        user."""
        for tries_left in reversed(range(1 if port else TRIES)):
            with ExitStack() as undone:
                try:
                    self._held = undone.enter_context(_held(host, port))
                    self.port: int = self._held.getsockname()[1]
                    self._guard = undone.enter_context(_guard(host, self.port))
                except OSError as error:
                    if tries_left:
                        continue
                    raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
                undone.pop_all()
                return

    def close(self) -> None:
        self._held.close()
        self._guard.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _held(host: str, port: int) -> socket.socket:
    """Return a bound socket. The first one makes sure that the port is free. It allows the port to be in use by
    connections that are ending, so the second one has to keep the port: with `SO_REUSEADDR` a socket of any user could
    bind it too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as undone:
        held = undone.enter_context(socket.socket(family))
        with socket.socket(family) as first:
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            first.bind((host, port))
            first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(first.getsockname())
        undone.pop_all()
    return held


def _guard(host: str, port: int) -> socket.socket:
    """Return a bound socket of the other address family, which allows no other socket at this port.

    Without it another user could first bind the port in the other family only, and then, as the kernel allows a second
    socket to a user who has one, in both families. The second socket would get the connections while no server listens.
    """
    with ExitStack() as undone:
        guard = undone.enter_context(socket.socket(socket.AF_INET if ":" in host else socket.AF_INET6))
        try:
            if guard.family == socket.AF_INET6:
                guard.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                guard.bind(("::", port))
            elif host != "::":  # which stands for both families
                guard.bind(("0.0.0.0", port))
        except OSError as error:
            if error.errno not in WITHOUT_IPV6:
                raise
        undone.pop_all()
    return guard
