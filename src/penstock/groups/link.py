"""Connections between a driver and those who keep its workers on other machines.

Both ends prove that they have the same key before anything is read that could do harm; neither shows it, and a proof
holds for one connection to one address. What follows is as open to whoever owns the network as what ranks send each
other. A connection whose other end has vanished without a word is given up after `SILENT_S`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from typing import Any, Literal

Side = Literal["driver", "keeper"]

SILENT_S = 20
"""Without a sign of life from the other machine, until nothing more is expected of it."""
PROBE_S = 5
"""Between two questions for one."""
PROVE_S = 5.0
"""For a connection to be made, and for all that comes before its use."""
SALT_BYTES, PROOF_BYTES, LIFE_BYTES = 32, 32, 16


class Stranger(ConnectionError):
    """The other end has another key, or none."""


def connect(address: tuple[str, int], key: bytes, life: bytes) -> socket.socket:
    """To a keeper's process of its own. `life`: whose connections belong together, `LIFE_BYTES`. Raises OSError if
    nobody answers there, `Stranger` if it is not the run's."""
    link = socket.create_connection(address, timeout=PROVE_S)
    try:
        _prove(link, key, "driver", time.monotonic() + PROVE_S)
        link.sendall(life)
        _ready(link)
    except BaseException:
        link.close()
        raise
    return link


def welcome(link: socket.socket, key: bytes) -> bytes:
    """A driver that has connected, and knows the key; returns its life. Raises `Stranger`, OSError."""
    give_up = time.monotonic() + PROVE_S
    _prove(link, key, "keeper", give_up)
    life = _received(link, LIFE_BYTES, give_up)
    _ready(link)
    return life


def place_of(link: socket.socket) -> str:
    """`host:port` of the other end, if it is there."""
    try:
        return _shown(link.getpeername())
    except OSError:
        return "the other machine"


def _prove(link: socket.socket, key: bytes, side: Side, give_up: float) -> None:
    """Of both ends to each other."""
    other: Side = "keeper" if side == "driver" else "driver"
    stranger = Stranger(f"{place_of(link)} does not know the key of this run")
    keeper = _shown(link.getpeername() if side == "driver" else link.getsockname())
    salt = secrets.token_bytes(SALT_BYTES)
    try:
        link.sendall(salt)
        theirs = _received(link, SALT_BYTES, give_up)
        link.sendall(_proof(key, side, keeper, salt, theirs))
        shown = _received(link, PROOF_BYTES, give_up)
    except EOFError:
        raise stranger from None
    if not hmac.compare_digest(shown, _proof(key, other, keeper, theirs, salt)):
        raise stranger


def _proof(key: bytes, side: Side, keeper: str, salt: bytes, theirs: bytes) -> bytes:
    """Who it is for, and where he was found, is part of it: nobody can give back or pass on what he was given."""
    return hmac.digest(key, b"|".join((side.encode(), keeper.encode(), salt, theirs)), hashlib.sha256)


def _received(link: socket.socket, length: int, give_up: float) -> bytes:
    """So many bytes, however slowly they come, by then. Raises EOFError, TimeoutError."""
    received = b""
    while len(received) < length:
        link.settimeout(max(give_up - time.monotonic(), 1e-3))
        if not (more := link.recv(length - len(received))):
            raise EOFError
        received += more
    return received


def _shown(address: Any) -> str:
    host, port = address[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def _ready(link: socket.socket) -> None:
    """For use: it blocks, and is watched."""
    link.settimeout(None)
    _watch(link)


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
