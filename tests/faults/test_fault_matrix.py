"""Whatever happens to any process of a run in any phase, the run ends as it should, and its books are right.

The matrix is whole: every victim meets every fault in every phase. One run meets all phases, one after the other; its
supervisor, controller and environment worker are the real ones. Left out is what cannot be:

* a full disk for the rollout server, which writes nothing;
* lost messages for the supervisor, which is not on the bus.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from faulty_run import EVAL_TASKS, GROUP_SIZE, GROUPS_PER_STEP, HERE, STEPS, WATCHFUL, FaultyRun
from injection import CONTROLLER, ROLLOUT, SUPERVISOR, VICTIMS, Fault, Phase, Plan, struck_phases
from stand_in_run import state_of, until

from penstock.observe import jsonl
from penstock.ports.group_records import GroupRecord
from penstock.ports.training import SavedState
from penstock.scheduler.ledger import FINAL
from penstock.store.index import read_groups
from penstock.supervisor.failure import ExitKind
from penstock.supervisor.run_journal import SUPERVISOR_KILLED
from penstock.supervisor.states import RunState
from penstock.system import CHECKPOINTS
from penstock.trainer import checkpoint
from penstock.types import EpisodeState

pytestmark = [pytest.mark.integration, pytest.mark.long]

IMPOSSIBLE = {(ROLLOUT, Fault.FULL_DISK), (SUPERVISOR, Fault.LOST_MESSAGES)}
PLANS = [Plan(victim, fault) for victim in VICTIMS for fault in Fault if (victim, fault) not in IMPOSSIBLE]
FATAL = frozenset({Fault.KILL, Fault.HANG, Fault.TERMINATE, Fault.LEAVE})
"""For a process that is not ready yet: it is not started again."""
LIFE_S = 400.0
SUPERVISOR_LOG = "logs/supervisor.log"
HOW = {
    Fault.KILL: (ExitKind.CRASHED, "killed by SIGKILL"),
    Fault.HANG: (ExitKind.HUNG, "hung: no heartbeat"),
    Fault.TERMINATE: (ExitKind.OK, "exit code 0"),
    Fault.LEAVE: (ExitKind.OK, "exit code 0"),
    Fault.FULL_DISK: (ExitKind.DISK_FULL, "exit code 1"),
}
"""How a process ends that was ready: the kind, and how the reason begins."""
HOW_UNREADY = HOW | {
    Fault.HANG: (ExitKind.HUNG, f"was not ready after {WATCHFUL.ready_timeout_s:g} s"),
    Fault.TERMINATE: (ExitKind.CRASHED, "killed by SIGTERM"),
}
END = {RunState.STOPPING, RunState.FAILED}
"""From then on every process ends."""


def ending(plan: Plan, phase: Phase) -> RunState | None:
    """Of the life of the run in which the victim is struck; None if it goes on to the next phase."""
    if plan.victim == SUPERVISOR and plan.fault in (Fault.KILL, Fault.LEAVE):
        return RunState.FAILED
    if plan.victim == SUPERVISOR and plan.fault is Fault.TERMINATE:
        return RunState.STOPPED
    if plan.victim == SUPERVISOR and plan.fault is Fault.FULL_DISK and phase is Phase.STOPPING:
        return RunState.STOPPING  # the end itself found no room
    if plan.victim != SUPERVISOR and plan.fault in FATAL and phase is Phase.STARTING:
        return RunState.FAILED
    return RunState.STOPPED if phase is Phase.STOPPING else None


def lives(plan: Plan) -> list[tuple[list[Phase], RunState]]:
    """The phases in which the victim is struck in every life of the run, and how that ends."""
    found: list[tuple[list[Phase], RunState]] = []
    struck: list[Phase] = []
    for phase in Phase:
        struck.append(phase)
        if end := ending(plan, phase):
            found.append((struck, end))
            struck = []
    return [*found, (struck, RunState.COMPLETED)]


def marks(plan: Plan) -> list[pytest.MarkDecorator]:
    """Save time in CI: of the processes that end with exit code 0, it has controller and supervisor only."""
    ends_well = plan.fault in (Fault.TERMINATE, Fault.LEAVE)
    return [pytest.mark.longest] if ends_well and plan.victim not in (CONTROLLER, SUPERVISOR) else []


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, id=f"{plan.victim} {plan.fault}", marks=marks(plan)) for plan in PLANS]
)
def test_a_run_survives(plan: Plan, tmp_path: Path) -> None:
    run = FaultyRun(tmp_path, plan)
    for struck, end in lives(plan):
        live(run, plan, tmp_path)
        check_end(run, plan, end)
        check_exits(run, plan, struck, end)
    check_faults(run, plan)
    check_books(run)
    check_versions(run)


def live(run: FaultyRun, plan: Plan, base: Path) -> None:
    """One life of the run, to its end."""
    (run.run_dir / "logs").mkdir(exist_ok=True)
    with (run.run_dir / SUPERVISOR_LOG).open("ab") as log:
        words = [sys.executable, str(HERE / "faulty_run.py"), str(base)]
        process = subprocess.Popen(words, env=os.environ | plan.environment, stderr=log)
    try:
        process.wait(LIFE_S)
    finally:
        process.kill()
        process.wait()


def check_end(run: FaultyRun, plan: Plan, end: RunState) -> None:
    """It is recorded, with its cause, and nothing is left of this life of the run; a janitor may take a moment."""
    with suppress(AssertionError):
        until(lambda: (state_of(run)["status"], run.living(), run.runtime_dir.exists()) == (end, [], False))
    state = state_of(run)
    assert state["status"] == end, state["error"]
    assert (state["leftovers"], run.living(), run.runtime_dir.exists()) == ([], [], False)
    if end is RunState.FAILED:
        check_cause(state["error"], plan)


def check_cause(error: str, plan: Plan) -> None:
    """Of a run that failed."""
    if plan.victim == SUPERVISOR:
        assert error == SUPERVISOR_KILLED
    else:
        assert error.startswith(plan.victim) and f"while starting ({HOW_UNREADY[plan.fault][1]}" in error, error


def check_exits(run: FaultyRun, plan: Plan, struck: list[Phase], end: RunState) -> None:
    """Until the latest life of the run began to end, only the victim ended, and the journal says how."""
    history = events(run)
    begin = max(i for i, event in enumerate(history) if event.get("to") == RunState.STARTING)
    life = itertools.takewhile(lambda event: event.get("to") not in END, history[begin:])
    exits = [event for event in life if event.get("state") == "exited"]
    found = [(event["name"], event["kind"], event["reason"]) for event in exits if event["reason"] != SUPERVISOR_KILLED]
    expected = expected_exits(plan, struck)
    if end is RunState.COMPLETED:
        expected.append((CONTROLLER, ExitKind.OK, "exit code 0"))
    assert [exit_[:2] for exit_ in found] == [exit_[:2] for exit_ in expected], f"struck {struck}: {found}"
    for (*_, said), (*_, how) in zip(found, expected, strict=True):
        assert said.startswith(how)


def expected_exits(plan: Plan, struck: list[Phase]) -> list[tuple[str, ExitKind, str]]:
    """(name, kind, how the reason begins) of a victim that is struck while the run is not ending yet."""
    if plan.victim == SUPERVISOR or plan.fault is Fault.LOST_MESSAGES:
        return []
    return [
        (plan.victim, *(HOW_UNREADY if phase is Phase.STARTING else HOW)[plan.fault])
        for phase in struck
        if phase is not Phase.STOPPING
    ]


def check_faults(run: FaultyRun, plan: Plan) -> None:
    """They happened."""
    assert struck_phases(run.run_dir) == list(Phase)
    if plan.fault is Fault.LOST_MESSAGES:
        assert {f"lost-{phase}" for phase in list(Phase)[:-1]} <= {path.name for path in run.run_dir.glob("lost-*")}
    if (plan.victim, plan.fault) == (SUPERVISOR, Fault.FULL_DISK):
        assert "the run cannot record its state" in (run.run_dir / SUPERVISOR_LOG).read_text()


def check_books(run: FaultyRun) -> None:
    """Of a run that is complete."""
    records = list(read_groups(run.run_dir, setting="test"))
    holds: list[list[int]] = json.loads(Path(final_checkpoint(run).directory, "weights.json").read_text())
    trained = list(itertools.chain(*holds))
    assert len(holds) == STEPS
    assert len(set(trained)) == len(trained) == STEPS * GROUPS_PER_STEP, "a group was trained twice"
    assert {record.group for record in records if record.state == EpisodeState.TRAINED} == set(trained)
    assert [record.task_index for record in records] == list(range(len(records))), "lost, or admitted twice"
    assert all(record.state in FINAL and sum(record.counts.values()) == GROUP_SIZE for record in records)
    check_ledger(run, records)


def check_ledger(run: FaultyRun, records: list[GroupRecord]) -> None:
    (completed,) = [event for event in events(run) if event["event"] == "completed"]
    ledger = {state: count for state, count in completed["ledger"].items() if count}
    assert ledger.pop("admitted") == GROUP_SIZE * len(records)
    assert ledger == dict(sum((Counter(record.counts) for record in records), Counter[str]()))
    evaluations = Counter(event["when"] for event in events(run) if event["event"] == "evaluation")
    assert evaluations == {"before": 1, "after": 1} and EVAL_TASKS


def check_versions(run: FaultyRun) -> None:
    """A version never goes down at a server, and never means two things; the last one is served."""
    fingerprints: defaultdict[int, set[str]] = defaultdict(set)
    served = jsonl.read(run.run_dir / "served.jsonl")
    for line in served:
        fingerprints[line["policy_version"]].add(line["fingerprint"])
    assert all(len(found) == 1 for found in fingerprints.values()), fingerprints
    versions = [line["policy_version"] for line in served]
    assert versions == sorted(versions)
    assert versions[-1] == final_checkpoint(run).policy_version


def final_checkpoint(run: FaultyRun) -> SavedState:
    newest = checkpoint.latest(run.run_dir / CHECKPOINTS).newest
    assert newest is not None and newest.step == STEPS
    return newest


def events(run: FaultyRun) -> list[dict[str, Any]]:
    return jsonl.read(run.run_dir / "events.jsonl")
