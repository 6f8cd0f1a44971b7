"""Every fault at every process in every phase, as far as the supervisor is concerned, in seconds.

The real runs that meet the same faults are in `tests/faults`; what the loops and the ledger make of a death is held by
`tests/test_recovery.py`, on the same clock.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launcher_stand_in import MACHINE_GONE, NAMES, NO_ROOM, STAGES, FakeProcess, Fault, Strike, VirtualRun

from penstock.config import SupervisorConfig
from penstock.ports.process_launcher import Look
from penstock.simulator.clock import run_virtual
from penstock.supervisor.failure import ExitKind
from penstock.supervisor.states import ProcessState, RunState

SETTINGS = SupervisorConfig(silent_s=30.0, hang_s=60.0, max_restarts=3, restart_window_s=3600.0)
NUM_STEPS = 300
MEMBERS = [name for stage in STAGES for name in stage]
ENDS = {
    Fault.KILL: (ExitKind.CRASHED, "killed by SIGKILL"),
    Fault.HANG: (ExitKind.HUNG, "hung: no heartbeat for 30"),
    Fault.STUCK: (ExitKind.HUNG, "hung: no progress with Step for 60"),
    Fault.TERMINATE: (ExitKind.OK, "exit code 0"),
    Fault.LEAVE: (ExitKind.OK, "exit code 0"),
    Fault.FULL_DISK: (ExitKind.DISK_FULL, "exit code 1"),
    Fault.LOSE_MACHINE: (ExitKind.LOST, MACHINE_GONE),
}
"""How the supervisor records the end of a process that was ready: the kind, and how the reason begins."""
UNREADY_ENDS = ENDS | {
    Fault.HANG: (ExitKind.HUNG, "was not ready after 20 s: it is not ready yet"),
    Fault.TERMINATE: (ExitKind.CRASHED, "killed by SIGTERM"),
}
STARTS_AT = {"controller": 0.0, "rollout-0": 2.5, "trainer-0": 2.5, "env-0": 5.5}
"""Just after each process is spawned, before it is ready."""


def state(run: VirtualRun) -> dict[str, Any]:
    return dict(json.loads((run.run_dir / "state.json").read_text()))


def losses(run: VirtualRun) -> list[tuple[str, str, str]]:
    """(name, kind, reason) of every process that ended while the run was starting or running."""
    found = []
    for event in run.events:
        if event.get("to") in (RunState.STOPPING, RunState.FAILED):
            break
        if event.get("state") == ProcessState.EXITED:
            found.append((str(event["name"]), str(event["kind"]), str(event["reason"])))
    return found


def assert_all_ended(run: VirtualRun) -> None:
    assert run.launcher.swept and all(process.end for process in run.launcher.all)
    ended = {ProcessState.EXITED, ProcessState.FATAL, ProcessState.PENDING}
    assert {known["state"] for known in state(run)["processes"].values()} <= ended
    assert state(run)["leftovers"] == []


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("victim", NAMES)
def test_a_process_that_fails_in_mid_run_is_restarted_and_the_run_completes(
    tmp_path: Path, victim: str, fault: Fault
) -> None:
    strikes = [Strike(victim, fault, at) for at in (20.0, 150.0)]
    run = VirtualRun(tmp_path, strikes, SETTINGS, num_steps=NUM_STEPS)
    outcome = run_virtual(run.live())
    assert outcome.status is RunState.COMPLETED and run.launcher.num_done == NUM_STEPS
    kind, how = ENDS[fault]
    *found, last = losses(run)
    assert [(name, found_kind) for name, found_kind, _ in found] == [(victim, kind)] * 2
    assert all(reason.startswith(how) for *_, reason in found)
    assert last == ("controller", ExitKind.OK, "exit code 0"), "the controller ends the run, and nobody else ended"
    assert state(run)["processes"][victim]["restarts"] == 2
    started = [process.spec.name for process in run.launcher.all]
    assert sorted(started) == sorted([*MEMBERS, victim, victim])
    assert_all_ended(run)


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault not in (Fault.STUCK, Fault.LOSE_MACHINE)])
@pytest.mark.parametrize("victim", NAMES)
def test_a_process_that_fails_before_it_is_ready_fails_the_run(tmp_path: Path, victim: str, fault: Fault) -> None:
    strike = Strike(victim, fault, STARTS_AT[victim] + 0.1)
    run = VirtualRun(tmp_path, [strike], SETTINGS, num_steps=NUM_STEPS)
    outcome = run_virtual(run.live())
    assert outcome.status is RunState.FAILED
    kind, how = UNREADY_ENDS[fault]
    (loss,) = losses(run)
    assert loss[:2] == (victim, kind) and loss[2].startswith(how)
    said = f": {NO_ROOM}" if fault is Fault.FULL_DISK else ""
    verb = "ended" if kind is ExitKind.OK else "failed"
    assert outcome.message.startswith(f"{victim} {verb} while starting{said} ({how}"), outcome.message
    assert f"{victim} was never ready, so it is not restarted" in outcome.message
    assert state(run)["error"] == outcome.message
    assert_all_ended(run)


@pytest.mark.parametrize("victim", NAMES)
def test_a_process_that_loses_its_machine_before_it_is_ready_is_restarted(tmp_path: Path, victim: str) -> None:
    strikes = [Strike(victim, Fault.LOSE_MACHINE, STARTS_AT[victim] + after) for after in (0.1, 1.9)]
    run = VirtualRun(tmp_path, strikes, SETTINGS, num_steps=NUM_STEPS)
    outcome = run_virtual(run.live())
    assert outcome.status is RunState.COMPLETED and run.launcher.num_done == NUM_STEPS, outcome.message
    assert state(run)["processes"][victim]["restarts"] == 2
    assert_all_ended(run)


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("victim", NAMES)
def test_a_process_that_fails_while_the_run_stops_does_not_hold_it_up(
    tmp_path: Path, victim: str, fault: Fault
) -> None:
    run = VirtualRun(tmp_path, [Strike(victim, fault, 20.01)], SETTINGS, num_steps=NUM_STEPS)
    outcome = run_virtual(run.live(stop_after_s=20.0))
    assert outcome.status is RunState.STOPPED
    unclean = (Fault.KILL, Fault.HANG, Fault.FULL_DISK, Fault.LOSE_MACHINE)
    is_unclean = victim == "controller" and fault in unclean
    assert ("the final checkpoint may be missing" in outcome.message) == is_unclean, outcome.message
    first = next(name for name, signum in run.launcher.signals if signum == signal.SIGTERM)
    assert first == "controller", "it saves what was learned while the others still serve"
    assert len(run.launcher.all) == len(MEMBERS), "nothing is started again"
    assert_all_ended(run)


def test_a_failure_is_explained_while_a_later_stage_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look = FakeProcess.look

    async def slow(process: FakeProcess) -> Look:
        await asyncio.sleep(1.0)
        return await look(process)

    monkeypatch.setattr(FakeProcess, "look", slow)
    strike = Strike("controller", Fault.KILL, 3.9)
    run = VirtualRun(tmp_path, [strike], SETTINGS.model_copy(update={"max_restarts": 0}), num_steps=NUM_STEPS)
    outcome = run_virtual(run.live())
    assert {process.spec.name for process in run.launcher.all} == set(MEMBERS), "it started during the look"
    assert outcome.status is RunState.FAILED and "controller failed in mid-run" in outcome.message
    assert_all_ended(run)


def test_a_stop_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    slow = SETTINGS.model_copy(update={"backoff_s": 600.0, "max_backoff_s": 600.0})
    run = VirtualRun(tmp_path, [Strike("env-0", Fault.KILL, 20.0)], slow, num_steps=NUM_STEPS)

    async def seconds() -> float:
        assert (await run.live(stop_after_s=30.0)).status is RunState.STOPPED
        return run.launcher.now

    assert run_virtual(seconds()) < 60.0
    known = state(run)["processes"]["env-0"]
    assert (known["state"], known["kind"], known["reason"]) == ("exited", "crashed", "killed by SIGKILL")
    assert_all_ended(run)


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("victim", NAMES)
def test_a_process_that_keeps_failing_fails_the_run_and_is_named(tmp_path: Path, victim: str, fault: Fault) -> None:
    run = VirtualRun(tmp_path, [Strike(victim, fault, 20.0, again=True)], SETTINGS, num_steps=100_000)
    outcome = run_virtual(run.live())
    assert outcome.status is RunState.FAILED
    assert {name for name, *_ in losses(run)} == {victim}
    assert outcome.message.startswith(victim), outcome.message
    assert f"{victim} has used 3 of 3 restarts within 3600 s" in outcome.message
    assert state(run)["processes"][victim]["state"] == ProcessState.FATAL
    assert_all_ended(run)


MOMENTS = st.floats(10.0, 250.0)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.builds(Strike, st.sampled_from(NAMES), st.sampled_from(list(Fault)), MOMENTS), max_size=6))
def test_whatever_fails_whenever_a_run_within_its_budget_completes(strikes: list[Strike]) -> None:
    """Also when several processes fail at once, and when one fails while another one is restarted."""
    generous = SETTINGS.model_copy(update={"max_restarts": len(strikes) + 1, "max_backoff_s": 5.0})
    # A process that is restarted may be struck before it is ready: like any loss after the first readiness, it counts.
    with tempfile.TemporaryDirectory() as directory:
        run = VirtualRun(Path(directory), strikes, generous, num_steps=NUM_STEPS)
        outcome = run_virtual(run.live())
        assert outcome.status is RunState.COMPLETED, outcome.message
        assert run.launcher.num_done == NUM_STEPS
        assert {name for name, *_ in losses(run)} <= {strike.victim for strike in strikes} | {"controller"}
        assert_all_ended(run)
