"""The Ray backend of worker groups: an actor for each rank, in a slot of a pool. It carries calls, and nothing else.

What several ranks are given is put into the object store once, and arrays are read there without a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from penstock.cluster.calls import end_of
from penstock.cluster.placement import Slot
from penstock.deadline import Stalled
from penstock.groups.backend import Backend, Call, Gone, Handle, Raised, settle
from penstock.groups.errors import CallRefused, RemoteError, WorkerLost
from penstock.groups.hosted import Hosted, Make
from penstock.groups.role import Rank, Role

START_S = 180.0
"""For actors to start, import what they are to hold, and build it."""
PLAIN = (bool, int, float, str, type(None))


class RayBackend(Backend):
    """All roles of a rank live in one actor, in the slot of that rank."""

    def __init__(self, roles: Mapping[str, Role], slots: Sequence[Slot], *, share: float = 1.0) -> None:
        """`share`: of what a slot may use, where other groups live in the same slots."""
        super().__init__(roles, len(slots))
        self._lock = threading.Lock()
        self._ends: dict[int, str] = {}
        """Of workers that are no more, by rank."""
        host: Any = ray.remote(Host)
        self._actors: list[Any] = [host.options(**slot.options(share=share)).remote() for slot in slots]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
        stored = _Stored(calls)
        with self._lock:  # so that every worker sees all calls in the same order
            for rank in calls:
                if rank in self._ends:
                    raise Gone(rank, self._ends[rank])
            return {rank: self._send(rank, call, stored.values(call)) for rank, call in calls.items()}

    def close(self) -> None:
        with self._lock:
            self._ends = dict.fromkeys(range(self.size), "the group was closed") | self._ends
        for actor in self._actors:
            ray.kill(actor)

    def _make(self) -> None:
        names, refs = "+".join(self.roles), {}
        for rank, actor in enumerate(self._actors):
            refs[actor.act.remote(Make(self.roles, Rank(rank, self.size)))] = rank
        _, missing = ray.wait(list(refs), num_returns=len(refs), timeout=START_S)
        if missing:
            ranks = ", ".join(str(refs[ref]) for ref in missing)
            raise Stalled(waiter="the driver", resource=f"actors of {names}", holder=f"ranks {ranks}", seconds=START_S)
        for ref, rank in refs.items():
            try:
                is_raised, result = ray.get(ref)
            except RayError as error:
                raise WorkerLost(rank=rank, role=names, method="__init__", end=end_of(error)) from None
            if is_raised:
                raise RemoteError(result, rank=rank, role=names, method="__init__")

    def _send(self, rank: int, call: Call, values: Sequence[Any]) -> Handle:
        handle: Handle = Handle()
        ref = self._actors[rank].act.remote(replace(call, arguments=dict.fromkeys(call.arguments)), *values)
        ref.future().add_done_callback(lambda answer: self._settle(rank, handle, answer))
        return handle

    def _settle(self, rank: int, handle: Handle, answer: Any) -> None:
        error = answer.exception()
        if isinstance(error, RayActorError):
            self._ends.setdefault(rank, end_of(error))
            settle(handle, error=Gone(rank, self._ends[rank]))
        elif error is not None:
            settle(handle, error=Raised.of(error.cause if isinstance(error, RayTaskError) else error))
        else:
            is_raised, result = answer.result()
            if is_raised:
                settle(handle, error=result)
            else:
                settle(handle, result)


class Host:
    """Holds the workers of one rank."""

    def __init__(self) -> None:
        self._hosted = Hosted()

    def act(self, request: Make | Call, *values: Any) -> tuple[bool, Any]:
        """(Whether it was raised, what came of it). `values`: of a call's arguments, in their order."""
        if isinstance(request, Call):
            request = replace(request, arguments=dict(zip(request.arguments, values, strict=True)))
        return self._hosted.outcome(request)


class _Stored:
    """The values of calls on several ranks, each in the object store once; small plain ones travel with their call."""

    def __init__(self, calls: Mapping[int, Call]) -> None:
        self._refs: dict[int, Any] = {}
        for call in calls.values():
            for name, value in call.arguments.items():
                if not isinstance(value, PLAIN) and id(value) not in self._refs:
                    self._refs[id(value)] = _put(call, name, value)

    def values(self, call: Call) -> list[Any]:
        """What to send for its arguments."""
        return [self._refs.get(id(value), value) for value in call.arguments.values()]


def _put(call: Call, name: str, value: Any) -> Any:
    try:
        return ray.put(value)
    except Exception as error:  # whatever its own pickling raises; Ray says much around it
        reason = error.__cause__ or error.__context__ or error
        raise CallRefused(f"{call.role}.{call.method}: {name} cannot be sent to an actor: {reason}") from error
