"""Connections between a driver and those who keep its workers on other machines.

Both ends prove that they have the same key before anything is read that could do harm; neither shows it, and a proof
serves one connection only. What follows is as open to whoever owns the network as what ranks send each other. A
connection whose other end has vanished without a word is given up after `SILENT_S`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from typing import Any, Literal

from penstock.groups.wire import exactly

Side = Literal["driver", "keeper"]

SILENT_S = 20
"""Without a sign of life from the other machine, until nothing more is expected of it."""
PROBE_S = 5
"""Between two questions for one."""
PROVE_S = 5.0
"""For a connection to be made, and for each message of a proof."""
SALT_BYTES, PROOF_BYTES = 32, 32


class Stranger(ConnectionError):
    """The other end has another key, or none."""


def connect(address: tuple[str, int], key: bytes) -> socket.socket:
    """To a keeper's process of its own. Raises OSError if nobody answers there, `Stranger` if it is not the run's."""
    link = socket.create_connection(address, timeout=PROVE_S)
    try:
        prove(link, key, "driver")
    except BaseException:
        link.close()
        raise
    return link


def prove(link: socket.socket, key: bytes, side: Side) -> None:
    """Of both ends to each other. From then on `link` blocks. Raises `Stranger`, OSError."""
    other: Side = "keeper" if side == "driver" else "driver"
    stranger = Stranger(f"{place_of(link.getpeername())} does not know the key of this run")
    link.settimeout(PROVE_S)
    salt = secrets.token_bytes(SALT_BYTES)
    try:
        link.sendall(salt)
        theirs = bytes(exactly(link, SALT_BYTES))
        link.sendall(_proof(key, side, salt, theirs))
        shown = exactly(link, PROOF_BYTES)
    except EOFError:
        raise stranger from None
    if not hmac.compare_digest(shown, _proof(key, other, theirs, salt)):
        raise stranger
    link.settimeout(None)
    _watch(link)


def place_of(address: Any) -> str:
    """`host:port`."""
    host, port = address[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def _proof(key: bytes, side: Side, salt: bytes, theirs: bytes) -> bytes:
    """Who it is for is part of it: nobody can give back what he was given."""
    return hmac.digest(key, b"|".join((side.encode(), salt, theirs)), hashlib.sha256)


def _watch(link: socket.socket) -> None:
    """Have the system notice that the other machine is gone, as far as it can."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in {
        "TCP_KEEPIDLE": PROBE_S,
        "TCP_KEEPINTVL": PROBE_S,
        "TCP_KEEPCNT": SILENT_S // PROBE_S,
        "TCP_USER_TIMEOUT": 1000 * SILENT_S,
    }.items():
        if hasattr(socket, name):
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
