"""The far side of `spawned.py`: one process that holds a worker of each role and does what it is told, in order.

The end of the socket is the end of this process, whatever it does: the driver is gone, or has closed the group.
"""

from __future__ import annotations

import os
import pickle
import queue
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.groups.backend import Call, Raised, carry_out
from penstock.groups.link import Seals
from penstock.groups.role import Rank, Role, make_all
from penstock.groups.wire import Frames, Wire, pack, unpack

SESSION = "PENSTOCK_LINK_SESSION"
"""Environment variable of a process that is called from another machine: what its messages are sealed with."""


@dataclass(frozen=True, slots=True)
class Make:
    """Hold these workers from now on. Comes first, and once."""

    roles: Mapping[str, Role]
    rank: Rank


class Hosted:
    """The workers by role, and how they are called."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}

    def answer(self, request: Frames) -> Frames:
        """A pickle of what `outcome` returns."""
        try:
            return pack(self.outcome(unpack(request)))
        except Exception as error:  # it did not arrive whole, or what came of it cannot travel
            return pack((True, _travelling(Raised.of(error))))

    def outcome(self, request: Make | Call) -> tuple[bool, Any]:
        """(Whether it was raised, what came of it)."""
        try:
            return False, self._act(request)
        except Raised as error:
            return True, _travelling(error)
        except Exception as error:
            return True, _travelling(Raised.of(error))

    def _act(self, request: Make | Call) -> Any:
        if isinstance(request, Call):
            return carry_out(self._workers, request)
        self._workers = make_all(request.roles, request.rank)
        return None


def _travelling(raised: Raised) -> Raised:
    """Without its exception, if that is lost on the way."""
    try:
        pickle.loads(pickle.dumps(raised.error))
    except Exception:
        return Raised(raised.kind, raised.message, raised.trace, None)
    return raised


def _read(wire: Wire, requests: queue.Queue[tuple[int, Frames]]) -> None:
    try:
        while True:
            requests.put(wire.receive())
    except (EOFError, OSError):
        os._exit(0)


def main() -> None:
    session = bytes.fromhex(os.environ.pop(SESSION, ""))
    wire = Wire(socket.socket(fileno=int(sys.argv[1])), Seals(session, "keeper") if session else None)
    requests: queue.Queue[tuple[int, Frames]] = queue.Queue()
    threading.Thread(target=_read, args=(wire, requests), daemon=True).start()
    hosted = Hosted()
    while True:
        number, request = requests.get()
        wire.send(number, hosted.answer(request))


if __name__ == "__main__":
    main()
