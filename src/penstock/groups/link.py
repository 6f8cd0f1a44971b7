"""Connections between a driver and those who keep its workers on other machines.

Both ends prove that they have the same key before anything is read that could do harm; neither shows it, and a proof
holds for one connection to one address. What follows is sealed message by message: whoever owns the network can read
it, as he can what ranks send each other, and can end it, but say nothing in another's name. A connection whose other
end has vanished without a word is given up after `SILENT_S`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Side = Literal["driver", "keeper"]
_OTHER: Mapping[Side, Side] = {"driver": "keeper", "keeper": "driver"}

SILENT_S = 20
"""Without a sign of life from the other machine, until nothing more is expected of it."""
PROBE_S = 5
"""Between two questions for one."""
PROVE_S = 5.0
"""For a connection to be made, and for all that comes before its use."""
SALT_BYTES, PROOF_BYTES, SEAL_BYTES, LIFE_BYTES = 32, 32, 32, 16


class Stranger(ConnectionError):
    """The other end has another key, or none."""


class Forged(ConnectionError):
    """A message that the other end has not sent, or not in this place."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection whose ends know each other."""

    socket: socket.socket
    session: bytes = field(repr=False)
    """Known to these two ends only."""


class Seals:
    """Of one end's messages, in their order."""

    def __init__(self, session: bytes, side: Side) -> None:
        self._sent, self._received = (hmac.digest(session, of.encode(), hashlib.sha256) for of in (side, _OTHER[side]))
        self._num_sent = self._num_received = 0

    def of_sent(self, message: Sequence[Any]) -> bytes:
        self._num_sent += 1
        return _seal(self._sent, self._num_sent, message)

    def check(self, message: Sequence[Any], seal: bytes | bytearray) -> None:
        """Raises `Forged`."""
        self._num_received += 1
        if not hmac.compare_digest(_seal(self._received, self._num_received, message), seal):
            raise Forged("the other end did not send this")


def connect(address: tuple[str, int], key: bytes, life: bytes) -> Link:
    """To a keeper's process of its own. `life`: whose connections belong together, `LIFE_BYTES`. Raises OSError if
    nobody answers there, `Stranger` if it is not the run's."""
    link = socket.create_connection(address, timeout=PROVE_S)
    try:
        ours = secrets.token_bytes(SALT_BYTES) + life
        session = _prove(link, key, "driver", ours, SALT_BYTES, time.monotonic() + PROVE_S)[1]
        _ready(link)
    except BaseException:
        link.close()
        raise
    return Link(link, session)


def welcome(link: socket.socket, key: bytes) -> tuple[bytes, bytes]:
    """A driver that has connected, and knows the key; returns its life, and the session. Raises `Stranger`, OSError."""
    ours, give_up = secrets.token_bytes(SALT_BYTES), time.monotonic() + PROVE_S
    theirs, session = _prove(link, key, "keeper", ours, SALT_BYTES + LIFE_BYTES, give_up)
    _ready(link)
    return theirs[SALT_BYTES:], session


def exactly(link: socket.socket, length: int, *, give_up: float | None = None) -> bytearray:
    """So many bytes, however slowly they come; by `give_up`, if that is given. Raises EOFError when the other end is
    gone before, TimeoutError."""
    frame = bytearray(length)
    view = memoryview(frame)
    while len(view):
        if give_up is not None:
            link.settimeout(max(give_up - time.monotonic(), 1e-3))
        received = link.recv_into(view)
        if not received:
            raise EOFError("the other end is gone")
        view = view[received:]
    return frame


def place_of(link: socket.socket) -> str:
    """`host:port` of the other end, if it is there."""
    try:
        return _shown(link.getpeername())
    except OSError:
        return "the other machine"


def _prove(
    link: socket.socket, key: bytes, side: Side, ours: bytes, num_theirs: int, give_up: float
) -> tuple[bytes, bytes]:
    """Of both ends to each other. `ours`: what this one opens with; returns what the other did, of `num_theirs` bytes,
    and a session."""
    other, stranger = _OTHER[side], Stranger(f"{place_of(link)} does not know the key of this run")
    keeper = _shown(link.getpeername() if side == "driver" else link.getsockname())
    try:
        link.sendall(ours)
        theirs = bytes(exactly(link, num_theirs, give_up=give_up))
        said = {side: ours, other: theirs}
        opening = b"|".join((keeper.encode(), said["driver"], said["keeper"]))
        link.sendall(_proof(key, side, opening))
        shown = exactly(link, PROOF_BYTES, give_up=give_up)
    except EOFError:
        raise stranger from None
    if not hmac.compare_digest(shown, _proof(key, other, opening)):
        raise stranger
    return theirs, _proof(key, "session", opening)


def _proof(key: bytes, what: str, opening: bytes) -> bytes:
    """Who it is for, and where he was found, is part of it: nobody can give back or pass on what he was given."""
    return hmac.digest(key, what.encode() + b"|" + opening, hashlib.sha256)


def _seal(key: bytes, number: int, message: Sequence[Any]) -> bytes:
    made = hmac.new(key, number.to_bytes(8, "big"), hashlib.sha256)
    for part in message:
        made.update(part)
    return made.digest()


def _shown(address: Any) -> str:
    host, port = address[:2]
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def _ready(link: socket.socket) -> None:
    """For use: it blocks, and the system notices that the other machine is gone, as far as it can."""
    link.settimeout(None)
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
