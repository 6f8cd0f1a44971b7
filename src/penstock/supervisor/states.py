"""The states of a run and of its processes, and which may follow which. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class IllegalTransition(RuntimeError):
    """A state was asked to follow one it cannot follow."""


class RunState(StrEnum):
    """Where a run is."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    """On its way to an end whose kind is already decided."""
    STOPPED = "stopped"
    """Ended because somebody asked for it."""
    COMPLETED = "completed"
    """The last step was trained, evaluated and recorded."""
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return not RUN_TRANSITIONS[self]


class ProcessState(StrEnum):
    """Where one process is."""

    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    """It lives, and gives cause for concern."""
    STOPPING = "stopping"
    EXITED = "exited"
    BACKOFF = "backoff"
    """Ended, and to be started again after a pause."""
    FATAL = "fatal"
    """Ended, and not to be started again: the run has failed."""


RUN_TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.PENDING: frozenset({RunState.STARTING, RunState.STOPPED, RunState.FAILED}),
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.STOPPING, RunState.FAILED}),
    RunState.RUNNING: frozenset({RunState.STOPPING, RunState.FAILED}),
    RunState.STOPPING: frozenset({RunState.STOPPED, RunState.COMPLETED, RunState.FAILED}),
    RunState.STOPPED: frozenset(),
    RunState.COMPLETED: frozenset(),
    RunState.FAILED: frozenset(),
}

_LIVING = frozenset({ProcessState.STOPPING, ProcessState.EXITED})

PROCESS_TRANSITIONS: Mapping[ProcessState, frozenset[ProcessState]] = {
    ProcessState.PENDING: frozenset({ProcessState.STARTING, ProcessState.EXITED}),
    ProcessState.STARTING: _LIVING | {ProcessState.READY},
    ProcessState.READY: _LIVING | {ProcessState.DEGRADED},
    ProcessState.DEGRADED: _LIVING | {ProcessState.READY},
    ProcessState.STOPPING: frozenset({ProcessState.EXITED}),
    ProcessState.EXITED: frozenset({ProcessState.BACKOFF, ProcessState.FATAL}),
    ProcessState.BACKOFF: frozenset({ProcessState.STARTING, ProcessState.EXITED}),
    ProcessState.FATAL: frozenset(),
}


def move_run(before: RunState, after: RunState) -> RunState:
    """`after`, if a run may go there from `before`."""
    if after not in RUN_TRANSITIONS[before]:
        raise IllegalTransition(f"a run that is {before} cannot become {after}")
    return after


def move_process(before: ProcessState, after: ProcessState) -> ProcessState:
    """`after`, if a process may go there from `before`."""
    if after not in PROCESS_TRANSITIONS[before]:
        raise IllegalTransition(f"a process that is {before} cannot become {after}")
    return after
