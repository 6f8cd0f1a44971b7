"""The guard of the bus: turns received bytes into envelopes, and counts the frames that it drops.

Any process that can open a socket of the bus can send anything. A frame that breaks a rule changes nothing: it is
counted by reason, logged once for each sender and reason, and dropped.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from penstock.control.messages import AnyMessage
from penstock.control.sockets import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

MAX_ENVELOPES = 4096
"""Limit of the messages in one frame. Senders divide larger batches."""
MAX_LOGGED = 256
"""Limit of the logged pairs of sender and reason."""
IDENTITY = re.compile(rb"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,127})/(?P<life>[0-9a-f]{16})")
UNDECODABLE = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError)

Reason = Literal["parts", "size", "identity", "content", "replaced", "greeting", "violation"]
"""Why a frame was dropped: its number of parts, its size, its sender's identity, its content, a sender that another
process of its name has replaced, a greeting of another run or version, or a message that breaks the protocol."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """One message in flight. Ids are unique per sender, also across restarts; a reply carries its request's id."""

    kind: Literal["notify", "request", "reply"]
    id: int
    body: AnyMessage


_decoder = msgspec.msgpack.Decoder(Annotated[list[Envelope], msgspec.Meta(max_length=MAX_ENVELOPES)])


class BadFrame(Exception):
    """A received frame breaks a rule of the bus."""

    def __init__(self, reason: Reason, explanation: str) -> None:
        super().__init__(explanation)
        self.reason: Reason = reason


class DropLog:
    """Counts dropped frames by reason, and logs each pair of sender and reason once."""

    def __init__(self, counts: Counter[str] | None = None) -> None:
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._logged: set[tuple[str, str]] = set()

    def drop(self, sender: str, bad: BadFrame) -> None:
        """Count a frame of `sender`, and log it if it is the first one for its reason."""
        self.counts[bad.reason] += 1
        pair = (sender, bad.reason)
        if pair in self._logged or len(self._logged) >= MAX_LOGGED:
            return
        self._logged.add(pair)
        # A violation has the traceback that led to it; it is a defect of a process of the run.
        level, trace = (logging.ERROR, bad) if bad.reason == "violation" else (logging.WARNING, None)
        explanation = str(bad)[:500].encode("unicode_escape").decode()
        logger.log(level, "dropped a frame of %s (%s): %s", sender, bad.reason, explanation, exc_info=trace)


def sender_of(parts: Sequence[bytes]) -> tuple[str, str]:
    """Return name and life of the process that sent a message to the controller. Raises `BadFrame`."""
    found = IDENTITY.fullmatch(parts[0]) if parts else None
    if found is None:
        raise BadFrame("identity", "the identity of its sender is not NAME/LIFE")
    return found["name"].decode(), found["life"].decode()


def envelopes_in(parts: Sequence[bytes]) -> list[Envelope]:
    """Return the envelopes of a message without its identity. Raises `BadFrame`."""
    if len(parts) != 1:
        raise BadFrame("parts", f"it has {len(parts)} parts, but must have one")
    if len(parts[0]) > MAX_FRAME_BYTES:
        raise BadFrame("size", f"it has {len(parts[0])} bytes, but may have {MAX_FRAME_BYTES}")
    try:
        envelopes: list[Envelope] = _decoder.decode(parts[0])
    except UNDECODABLE as error:
        raise BadFrame("content", f"it cannot be decoded: {type(error).__name__}: {error}") from None
    return envelopes


def shown(identity: bytes) -> str:
    """Return an identity as text for a log."""
    return repr(identity[:80])
