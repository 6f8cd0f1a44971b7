"""Whether a run that was hurt is still right: what became of every group, of every weights, of every process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise

from random_faults import RECOVERED_S, Fault, Injection, exits
from watched_run import SUPERVISOR, WatchedRun, Word

from penstock.observe import jsonl
from penstock.ports.group_records import GroupRecord
from penstock.scheduler.ledger import FINAL
from penstock.store.experience_pool import ExperiencePool
from penstock.supervisor.failure import ExitKind

ENDING = {"stopping", "stopped", "completed", "failed"}
"""States of a run in which its processes are ended."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """What is wrong with a run, by kind; nothing, if all is well."""

    lost: list[str] = field(default_factory=list)
    trained_twice: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    versions_reused: list[str] = field(default_factory=list)
    too_stale: list[str] = field(default_factory=list)

    def findings(self) -> dict[str, list[str]]:
        return asdict(self)


FINDINGS = [each.name for each in fields(Audit)]
"""Kinds of what can be wrong."""


def audit(run: WatchedRun, injections: Sequence[Injection], *, group_size: int, max_staleness: int) -> Audit:
    """Of a run that has ended."""
    pool = ExperiencePool(run.run_dir / "pool")
    try:
        records = list(pool.records())
    finally:
        pool.close()
    lineage = trained_groups(run.witness.words)
    twice = [f"group {group} {count} times" for group, count in Counter(lineage).items() if count > 1]
    versions = [line["policy_version"] for line in run.steps]
    stale = [line for line in run.steps if line["staleness_max"] > max_staleness]
    return Audit(
        lost=[*lost(records, admitted(run), set(lineage), group_size), *_unbalanced(run.steps)],
        trained_twice=twice,
        orphans=run.leftovers(),
        unexplained=[*unexplained_exits(run, injections), *unexplained_injections(run, injections)],
        versions_reused=[f"{new} after {old}" for old, new in pairwise(versions) if new <= old],
        too_stale=[f"step {line['step']}: {line['staleness_max']}" for line in stale],
    )


def trained_groups(words: Iterable[Word]) -> list[int]:
    """Return the groups that the final weights were trained on, from the reports of the trainers. A trainer that starts
    over holds no group. A trainer that goes back to a checkpoint holds the groups up to that checkpoint."""
    steps: list[list[int]] = []
    accumulated: list[int] = []
    pid = 0
    for word in words:
        if word["begins"] or word["role"] != "trainer":
            continue
        if word["pid"] != pid:
            pid, accumulated = word["pid"], []
        match word["what"]:
            case "Accumulate":
                accumulated += word["groups"]
            case "Step":
                steps.append(accumulated)
                accumulated = []
            case "Begin":
                steps = []
            case "Restore":
                steps = steps[: word["step"]]
    return [group for step in steps for group in step]


def admitted(run: WatchedRun) -> set[int]:
    """All groups that any controller ever admitted."""
    lines = jsonl.read(run.run_dir / "timeline.jsonl")
    return {line["group"] for line in lines if line.get("decider") == "admission"}


def lost(
    records: Sequence[GroupRecord], admitted: Collection[int], trained: Collection[int], group_size: int
) -> list[str]:
    """Return a finding for each group without a known end, and for each group on which pool and learner disagree."""
    known = {record.group for record in records}
    found = [f"group {group} is unknown to the pool" for group in sorted({*admitted, *trained} - known)]
    for record in records:
        if sum(record.counts.values()) != group_size or not record.counts.keys() <= FINAL:
            found.append(f"group {record.group} is {record.state}: {record.counts}")
        if (record.trained_in is not None) != (record.group in trained):
            found.append(f"group {record.group} is {record.state} for the pool, and not for the learner")
    return found


def unexplained_exits(run: WatchedRun, injections: Sequence[Injection]) -> list[str]:
    """Return a finding for each end of a process that no injection explains, or that has no reason in the journal."""
    found = []
    for exited in exits(run):
        ending = exited["run"] in ENDING or exited["kind"] == "lost"
        expected = ending or any(_follows(exited, injection) for injection in injections)
        if not exited["kind"] or not exited["reason"] or not expected:
            found.append(f"{exited['name']} {exited['pid']} ended: {exited['kind']} ({exited['reason']})")
    return found


def _follows(exited: Word, injection: Injection) -> bool:
    """Return whether a process ended because of `injection`. If the disk of a process is full, its callers may end too,
    with that reason."""
    if exited["pid"] == injection.pid:
        return True
    after_s = exited["time"] - injection.time
    is_told = injection.fault is Fault.DISK and exited["kind"] == ExitKind.DISK_FULL
    return is_told and 0 < after_s < (injection.recover_s or RECOVERED_S)


def unexplained_injections(run: WatchedRun, injections: Sequence[Injection]) -> list[str]:
    """Faults that the journal knows nothing of, or that had other consequences than they may."""
    ended = {exited["pid"] for exited in exits(run)}
    found = [f"{injection}: {wrong}" for injection in injections for wrong in injection.wrong]
    for injection in injections:
        killed_all = injection.victim == SUPERVISOR and injection.fault is Fault.KILL
        if injection.is_deadly and injection.pid not in ended:
            found.append(f"{injection}: no end in the journal")
        if killed_all and run.event_after(injection.time, event="state", to="failed") is None:
            found.append(f"{injection}: no end in the journal")
    return found


def _unbalanced(steps: Sequence[Word]) -> list[str]:
    """Return a finding for each optimizer step with a ledger that does not add up."""
    return [
        f"step {line['step']}: the ledger does not add up"
        for line in steps
        if line["ledger"]["admitted"] != sum(count for name, count in line["ledger"].items() if name != "admitted")
    ]
