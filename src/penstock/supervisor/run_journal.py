"""The journal of a run, which can be read after its supervisor died (standard library only, because the janitor uses
this module).

`events.jsonl` is the history. It is written first, and synced to disk on every change of the run's state. `state.json`
is the snapshot; it is never half-written. Only one object changes them, and only along legal transitions. A full disk
does not end the run: the journal writes the missing events later.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from penstock.observe import jsonl, log_lines, summary
from penstock.own_files import read_document
from penstock.redaction import redacted, redacted_text
from penstock.supervisor.failure import ExitKind
from penstock.supervisor.ownership import is_owned
from penstock.supervisor.procfs import Identity, identify, is_alive
from penstock.supervisor.states import ProcessState, RunState, check_process, check_run

logger = logging.getLogger(__name__)

LAST_EVENT_BYTES = 65_536
"""Bytes read from the end of the history to find its last event; an event is shorter."""
BEGUN = ("state.json", "lineage.json", "events.jsonl", "checkpoints", "pool/index")
"""Any of these files in a directory shows that a run was begun there."""
TIMES = ("started", "born", "ended", "lived_s")
"""Facts in seconds."""
LATEST_S = 1e11
"""Every time of a run lies before this one (seconds since the epoch)."""
FORMAT = 3
"""Version of the layout of a run directory."""
IN_STATE_ONLY = ("start_ticks", "boot_id", "pid_namespace", "role")
"""Facts about a process that log lines leave out."""
LOST = (ProcessState.BACKOFF, ProcessState.FATAL, ProcessState.DEGRADED)
GOOD_ENDS = (None, ExitKind.OK, ExitKind.KILLED_BY_SUPERVISOR)
SUPERVISOR_KILLED = "the supervisor was killed"


@dataclass(eq=False)
class RunJournal:
    """The only writer of a run's state."""

    _run_dir: Path
    _document: dict[str, Any]
    _unwritten: list[dict[str, Any]] = field(default_factory=list)
    """Events that a full disk has kept out of the history so far."""

    @classmethod
    def create(cls, run_dir: Path, *, run_id: str, runtime_dir: Path) -> RunJournal:
        """Begin the journal of a new run that this process owns."""
        document = {"format": FORMAT, "run_id": run_id, "lives": 1, "lived_s": 0.0, **_new_life(runtime_dir)}
        document["started"] = document["born"]
        jsonl.write_json(run_dir / "state.json", document)
        return cls(run_dir, document)

    @classmethod
    def load(cls, run_dir: Path) -> RunJournal:
        """Load the journal of an existing run."""
        return cls(run_dir, json.loads(read_document(run_dir / "state.json", ours=True)))

    @property
    def run_id(self) -> str:
        return str(self._document["run_id"])

    def keep(self, **facts: Any) -> None:
        """Store facts that stay the same in all lives of the run, unless an earlier life has stored them."""
        self._document = {**facts, **self._document}
        self._save()

    def begin_again(self, *, runtime_dir: Path, reason: str) -> None:
        """Begin another life of the run, which this process owns."""
        latest = jsonl.tail(self._run_dir / "events.jsonl", LAST_EVENT_BYTES)
        lived_s = summary.wall_seconds(self._document, now=latest[-1].get("time") if latest else None) or 0.0
        self.close_after_kill(actor="resume")
        before = self.status
        self._document |= {"lives": self._document["lives"] + 1, "lived_s": lived_s, **_new_life(runtime_dir)}
        self.note("state", durable=True, **{"from": before}, to=RunState.PENDING, actor="user", reason=reason)
        self._save()

    @property
    def status(self) -> RunState:
        return RunState(self._document["status"])

    def move(self, to: RunState, *, actor: str, reason: str = "") -> None:
        """Move the run to another state. Raises `IllegalTransition`."""
        before, reason = self.status, redacted_text(reason)
        check_run(before, to)
        self._document["status"] = to.value
        if to.is_final:
            self._document["ended"] = time.time()
            self._document["error"] = reason if to is RunState.FAILED else None
        self.note("state", durable=True, **{"from": before.value}, to=to.value, actor=actor, reason=reason)
        self._save()

    def move_process(self, name: str, to: ProcessState, **facts: Any) -> None:
        """Move one process to another state and store facts about it (pid, returncode, reason, ...)."""
        facts = redacted(facts)
        known = self._document["processes"].setdefault(name, {"state": ProcessState.PENDING.value})
        check_process(ProcessState(known["state"]), to)
        known.update(facts, state=to.value)
        self.note("process", name=name, state=to.value, **facts)
        self._save()

    def describe_process(self, name: str, **facts: Any) -> None:
        """Store facts about one process in the snapshot alone. They are no event."""
        self._document["processes"][name].update(redacted(facts))
        self._save()

    def close_processes(self, *, kind: str, reason: str) -> None:
        """Mark as ended every started process without a recorded end."""
        for name, known in self._document["processes"].items():
            state = ProcessState(known["state"])
            if state is ProcessState.BACKOFF:
                self.move_process(name, ProcessState.EXITED)
            elif state not in (ProcessState.PENDING, ProcessState.EXITED, ProcessState.FATAL):
                self.move_process(name, ProcessState.EXITED, kind=kind, reason=reason)

    def close_after_kill(self, *, actor: str) -> None:
        """Record that the supervisor was killed, unless the end of this life is recorded already."""
        self.close_processes(kind=ExitKind.LOST, reason=SUPERVISOR_KILLED)
        if not self.status.is_final:
            self.move(RunState.FAILED, actor=actor, reason=SUPERVISOR_KILLED)

    def is_complete(self) -> bool:
        """Return whether the controller has recorded the run's last step, in this life of the run."""
        events = jsonl.read(self._run_dir / "events.jsonl")
        started = max((i for i, event in enumerate(events) if event.get("to") == RunState.STARTING), default=0)
        return any(event.get("event") == "completed" for event in events[started:])

    def count(self, event: str) -> int:
        """Return how often this event was noted, in all lives of the run."""
        return sum(line.get("event") == event for line in jsonl.read(self._run_dir / "events.jsonl"))

    def add_leftovers(self, leftovers: list[str]) -> None:
        """Record the things that could not be removed, if there are any."""
        if leftovers:
            self._document["leftovers"] = leftovers
            self.note("leftovers", leftovers=leftovers)
            self._save()

    def note(self, event: str, *, durable: bool = False, **facts: Any) -> None:
        """Append an event to the history. With `durable`, return only once it is on disk."""
        facts = redacted(facts)
        logger.log(*_log_message(event, facts))
        self._unwritten.append({"time": time.time(), "event": event, **facts})
        with _tolerating_a_full_disk():
            while self._unwritten:
                jsonl.append(self._run_dir / "events.jsonl", self._unwritten[0], durable=durable)
                del self._unwritten[0]

    def _save(self) -> None:
        with _tolerating_a_full_disk():
            jsonl.write_json(self._run_dir / "state.json", self._document)


def _log_message(event: str, facts: Mapping[str, Any]) -> tuple[int, str]:
    """Return the level and the text of the log line about an event."""
    if event == "state":
        level = logging.ERROR if facts["to"] == RunState.FAILED else logging.INFO
        why = f": {reason}" if (reason := facts["reason"].partition("\n")[0]) else ""
        return level, f"run: {facts['from']} -> {facts['to']} (by {facts['actor']}{why})"
    if event != "process":
        return logging.INFO, f"{event}: {log_lines.pairs(facts)}"
    known = {name: value for name, value in facts.items() if name not in (*IN_STATE_ONLY, "name", "state")}
    is_lost = facts["state"] in LOST or facts.get("kind", ExitKind.OK) not in GOOD_ENDS
    level = logging.WARNING if is_lost else logging.DEBUG if facts["state"] == ProcessState.PENDING else logging.INFO
    return level, f"{facts['name']}: {facts['state']} {log_lines.pairs(known)}".rstrip()


@contextmanager
def _tolerating_a_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        with suppress(OSError):
            print(f"warning: the disk is full, and the run cannot record its state: {error}", file=sys.stderr)


def _new_life(runtime_dir: Path) -> dict[str, Any]:
    """Return the part of the snapshot that begins again with each life of a run. This process owns the run."""
    owner = identify(os.getpid())
    return {
        "status": RunState.PENDING.value,
        "error": None,
        "supervisor": {"host": os.uname().nodename} | (asdict(owner) if owner else {"pid": os.getpid()}),
        "runtime_dir": str(runtime_dir),
        "born": time.time(),
        "ended": None,
        "processes": {},
        "leftovers": [],
    }


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """Return the snapshot of a run; None if it is missing or damaged. A fact that it holds has the type that this
    module writes."""
    state = jsonl.read_json(run_dir / "state.json")
    return state if state and _is_sound(state) else None


def _is_sound(state: Mapping[str, Any]) -> bool:
    processes, leftovers = state.get("processes", {}), state.get("leftovers", [])
    return (
        _are(str, state, "status", "run_id", "runtime_dir")
        and _are(str | None, state, "error")
        and _are(int, state, "lives")
        and all(_is_time(state[key]) for key in TIMES if state.get(key) is not None)
        and isinstance(supervisor := state.get("supervisor", {}), dict)
        and isinstance(processes, dict)
        and all(isinstance(facts, dict) and _is_process(facts) for facts in [supervisor, *processes.values()])
        and isinstance(state.get("simulated", {}), dict)
        and isinstance(leftovers, list)
        and all(isinstance(each, str) for each in leftovers)
    )


def _is_process(facts: Mapping[str, Any]) -> bool:
    is_text = _are(str, facts, "role", "state") and _are(str | None, facts, "host", "node", "reason")
    return is_text and _are(int, facts, "restarts") and _are(int | None, facts, "pid", "returncode")


def _are(kind: type | UnionType, facts: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(facts[name], kind) for name in names if name in facts)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value < LATEST_S


def unreadable(run_dir: Path) -> str:
    """Return the error message for a run with a damaged or missing snapshot."""
    path = run_dir / "state.json"
    problem = f"{path} cannot be read" if path.exists() else f"{run_dir} holds a run without its state.json"
    return f"{problem}: restore it from a copy, or move the directory away (its checkpoints and logs remain usable)"


def holds_run(run_dir: Path) -> bool:
    """Return whether a run was begun in this directory, even if its state is lost."""
    return any((run_dir / name).exists() for name in BEGUN)


def owner_of(state: Mapping[str, Any]) -> Identity | None:
    """Return the supervisor that wrote a snapshot; None if the system could not identify it."""
    return Identity.of(state.get("supervisor"))


def is_supervised(run_dir: Path, supervisor: Identity) -> bool:
    """Return whether the supervisor of a run is alive. A supervisor on another machine or in another container counts
    as alive while the run has an owner. If its run directory is not found, we cannot know, and return True."""
    if supervisor.is_here:
        return is_alive(supervisor)
    return is_owned(run_dir) or not run_dir.is_dir()


def living_owner(run_dir: Path, state: Mapping[str, Any]) -> Identity | None:
    """Return the supervisor that wrote the snapshot of a run, if it is known and still alive; else None."""
    owner = owner_of(state)
    return owner if owner is not None and is_supervised(run_dir, owner) else None


def close_journal(run_dir: Path, leftovers: list[str]) -> None:
    """Close the journal of a run that has no supervisor any more. The caller must own the run."""
    journal = RunJournal.load(run_dir)
    journal.add_leftovers(leftovers)
    journal.close_after_kill(actor="janitor")
    summary.write(run_dir)
