"""The rank's side of calls: it holds a worker of each role, and carries out the driver's calls on them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.groups.backend import Call
from penstock.groups.errors import Raised
from penstock.groups.role import Rank, Role, make_all
from penstock.groups.wire import pack, unpack
from penstock.runtime.frames import Frames


@dataclass(frozen=True, slots=True)
class Make:
    """The request to build the workers. It is the first message, and comes once."""

    roles: Mapping[str, Role]
    rank: Rank


class RankWorker:
    """The workers of one rank, by role."""

    def __init__(self) -> None:
        self._workers: dict[str, Any] = {}

    @property
    def has_workers(self) -> bool:
        """Return whether the workers are built."""
        return bool(self._workers)

    def answer(self, request: Frames) -> Frames:
        """Carry out a pickled request. Return a pickle of its `outcome`."""
        try:
            return pack(self.outcome(unpack(request)))
        except Exception as error:  # the request did not arrive whole, or its result cannot be pickled
            return pack(_picklable(Raised.of(error)))

    def outcome(self, request: Make | Call) -> Any:
        """Carry out a request. Return its result, or `Raised`."""
        try:
            if isinstance(request, Call):
                return request.carry_out(self._workers)
            self._workers = make_all(request.roles, request.rank)
            return None
        except Exception as error:
            return _picklable(Raised.of(error))


def _picklable(raised: Raised) -> Raised:
    """Return the error, without its exception object if that cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(raised.error))
    except Exception:
        return replace(raised, error=None)
    return raised
