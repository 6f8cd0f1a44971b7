"""The Ray backend of worker groups: an actor for each rank, in a slot of a pool. It only carries calls.

A value that several ranks get is put into the object store once. The ranks read its arrays there without a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from penstock.cluster.connection import end_of
from penstock.cluster.placement import Slot
from penstock.groups.backend import Backend, Call, Handle
from penstock.groups.errors import CallRefused, Raised, WorkerLost
from penstock.groups.rank_worker import Make, RankWorker
from penstock.groups.role import Rank, Role

START_S = 180.0
"""Limit for actors to start, import the classes of their workers, and build the workers."""
PLAIN = (bool, int, float, str, type(None))


class RayBackend(Backend):
    """Workers in Ray actors. All roles of a rank share one actor, in the slot of that rank."""

    def __init__(self, roles: Mapping[str, Role], slots: Sequence[Slot], *, share: float = 1.0) -> None:
        """`share`: fraction of each slot's resources that this group uses; below 1 if other groups share the slots."""
        super().__init__(roles, len(slots))
        self._lock = threading.Lock()
        self._ends: dict[int, str] = {}
        """How workers ended, by rank; only workers that are gone."""
        actor: Any = ray.remote(RankActor)
        self._actors: list[Any] = [actor.options(**slot.options(share=share)).remote() for slot in slots]
        try:
            makes = [Make(self.roles, Rank(rank, self.size)) for rank in range(self.size)]
            handles = [self._send(rank, make, self._init_handle(rank)) for rank, make in enumerate(makes)]
            self._await_workers(handles, START_S)
        except BaseException:
            self.close()
            raise

    def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
        stored = _stored(calls)
        with self._lock:  # so that every worker sees all calls in the same order
            for rank, call in calls.items():
                if rank in self._ends:
                    raise WorkerLost(rank=rank, role=call.role, method=call.method, end=self._ends[rank])
            handles = {rank: Handle(rank, call.role, call.method) for rank, call in calls.items()}
            for rank, call in calls.items():
                values = [stored.get(id(value), value) for value in call.arguments.values()]
                self._send(rank, replace(call, arguments=dict.fromkeys(call.arguments)), handles[rank], values)
            return handles

    def close(self) -> None:
        with self._lock:
            self._ends = dict.fromkeys(range(self.size), "the group was closed") | self._ends
        for actor in self._actors:
            ray.kill(actor)

    def _send(self, rank: int, request: Make | Call, handle: Handle, values: Sequence[Any] = ()) -> Handle:
        ref = self._actors[rank].act.remote(request, *values)
        ref.future().add_done_callback(lambda answer: self._settle(rank, handle, answer))
        return handle

    def _settle(self, rank: int, handle: Handle, answer: Any) -> None:
        error = answer.exception()
        if isinstance(error, RayActorError):
            handle.lose(self._ends.setdefault(rank, end_of(error)))
        elif error is not None:
            handle.settle(Raised.of(error.cause if isinstance(error, RayTaskError) else error))
        else:
            handle.settle(answer.result())


class RankActor:
    """Holds the workers of one rank."""

    def __init__(self) -> None:
        self._worker = RankWorker()

    def act(self, request: Make | Call, *values: Any) -> Any:
        """Build the workers or carry out a call. Return the result or `Raised`. `values`: the values of the call's
        arguments, in their order."""
        if isinstance(request, Call):
            request = replace(request, arguments=dict(zip(request.arguments, values, strict=True)))
        return self._worker.outcome(request)


def _stored(calls: Mapping[int, Call]) -> dict[int, Any]:
    """Put each argument value of the calls into the object store once. Return the references by `id` of the value.
    Small plain values are left out; they travel with their call."""
    found: dict[int, Any] = {}
    for call in calls.values():
        for name, value in call.arguments.items():
            if not isinstance(value, PLAIN) and id(value) not in found:
                found[id(value)] = _put(call, name, value)
    return found


def _put(call: Call, name: str, value: Any) -> Any:
    try:
        return ray.put(value)
    except Exception as error:  # the value's own pickling may raise anything; Ray wraps it in long messages
        reason = error.__cause__ or error.__context__ or error
        raise CallRefused(f"{call.role}.{call.method}: {name} cannot be sent to an actor: {reason}") from error
