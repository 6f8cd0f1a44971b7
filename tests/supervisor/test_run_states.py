from __future__ import annotations

import pytest

from penstock.supervisor.states import (
    IllegalTransition,
    ProcessState,
    RunState,
    check_process,
    check_run,
)


def test_a_run_can_be_stopped_wherever_it_is() -> None:
    check_run(RunState.PENDING, RunState.STOPPED)
    for state in (RunState.STARTING, RunState.RUNNING):
        check_run(state, RunState.STOPPING)


def test_final_states_are_final() -> None:
    finals = {state for state in RunState if state.is_final}
    assert finals == {RunState.STOPPED, RunState.COMPLETED, RunState.FAILED}
    for state in finals:
        for following in RunState:
            with pytest.raises(IllegalTransition):
                check_run(state, following)


def test_only_a_stopping_run_completes() -> None:
    with pytest.raises(IllegalTransition, match="a run that is running cannot become completed"):
        check_run(RunState.RUNNING, RunState.COMPLETED)


def test_every_living_process_may_exit_and_comes_back_only_after_a_pause() -> None:
    living = {ProcessState.STARTING, ProcessState.READY, ProcessState.DEGRADED, ProcessState.STOPPING}
    for state in living:
        check_process(state, ProcessState.EXITED)
        with pytest.raises(IllegalTransition):
            check_process(ProcessState.EXITED, state)
    check_process(ProcessState.EXITED, ProcessState.BACKOFF)
    check_process(ProcessState.BACKOFF, ProcessState.STARTING)


def test_what_is_fatal_stays_so() -> None:
    for following in ProcessState:
        with pytest.raises(IllegalTransition):
            check_process(ProcessState.FATAL, following)
