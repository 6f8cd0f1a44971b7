"""The states of a run and of its processes, and the legal transitions between them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum


class IllegalTransition(RuntimeError):
    """A transition between these two states is not allowed."""


class RunState(StrEnum):
    """The state of a run."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    """The run is ending, and its final state is already decided."""
    STOPPED = "stopped"
    """The run ended because a user asked for it."""
    COMPLETED = "completed"
    """The last step was trained, evaluated and recorded."""
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self not in RUN_TRANSITIONS


class ProcessState(StrEnum):
    """The state of one process."""

    PENDING = "pending"
    STARTING = "starting"
    READY = "ready"
    DEGRADED = "degraded"
    """The process is alive, but has made no progress or sent no heartbeat for a while."""
    STOPPING = "stopping"
    EXITED = "exited"
    BACKOFF = "backoff"
    """The process ended, and will be restarted after a pause."""
    FATAL = "fatal"
    """The process ended and will not be restarted: the run has failed."""


RUN_TRANSITIONS: Mapping[RunState, Collection[RunState]] = {
    RunState.PENDING: (RunState.STARTING, RunState.STOPPED, RunState.FAILED),
    RunState.STARTING: (RunState.RUNNING, RunState.STOPPING, RunState.FAILED),
    RunState.RUNNING: (RunState.STOPPING, RunState.FAILED),
    RunState.STOPPING: (RunState.STOPPED, RunState.COMPLETED, RunState.FAILED),
}
"""Possible next states; final states have none."""
PROCESS_TRANSITIONS: Mapping[ProcessState, Collection[ProcessState]] = {
    ProcessState.PENDING: (ProcessState.STARTING, ProcessState.EXITED),
    ProcessState.STARTING: (ProcessState.READY, ProcessState.STOPPING, ProcessState.EXITED),
    ProcessState.READY: (ProcessState.DEGRADED, ProcessState.STOPPING, ProcessState.EXITED),
    ProcessState.DEGRADED: (ProcessState.READY, ProcessState.STOPPING, ProcessState.EXITED),
    ProcessState.STOPPING: (ProcessState.EXITED,),
    ProcessState.EXITED: (ProcessState.BACKOFF, ProcessState.FATAL),
    ProcessState.BACKOFF: (ProcessState.STARTING, ProcessState.EXITED),
}


def check_run(before: RunState, after: RunState) -> None:
    """Check that a run may go from `before` to `after`. Raises `IllegalTransition`."""
    if after not in RUN_TRANSITIONS.get(before, ()):
        raise IllegalTransition(f"a run that is {before} cannot become {after}")


def check_process(before: ProcessState, after: ProcessState) -> None:
    """Check that a process may go from `before` to `after`. Raises `IllegalTransition`."""
    if after not in PROCESS_TRANSITIONS.get(before, ()):
        raise IllegalTransition(f"a process that is {before} cannot become {after}")
