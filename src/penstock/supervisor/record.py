"""What is known of a run, kept so that a dead supervisor can still be asked (standard library only; the janitor too).

`events.jsonl` is the history, appended first and synced to disk on every change of the run's state; `state.json` is
the snapshot, always whole. Both change through one object, and only along legal transitions. A full disk ends no run:
what cannot be written is written later.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.observe import jsonl
from penstock.observe.summary import wall_seconds
from penstock.supervisor.failure import ExitKind
from penstock.supervisor.ownership import is_owned
from penstock.supervisor.procfs import Identity, identify, is_alive
from penstock.supervisor.states import ProcessState, RunState, move_process, move_run

LAST_EVENT_BYTES = 65_536
"""More than an event takes."""
BEGUN = ("state.json", "lineage.json", "events.jsonl", "checkpoints", "pool/index")
"""Any of these in a directory tells that a run was begun there."""
FORMAT = 2
"""Of a run directory: what lies where, and what it means."""
SUPERVISOR_KILLED = "the supervisor was killed"


class Record:
    """The one writer of a run's state."""

    def __init__(self, run_dir: Path, document: dict[str, Any]) -> None:
        self._run_dir = run_dir
        self._document = document
        self._unwritten: list[dict[str, Any]] = []
        """Of the history, because the disk is full."""

    @classmethod
    def create(cls, run_dir: Path, *, run_id: str, runtime_dir: Path) -> Record:
        """Begin the record of a new run, owned by this process."""
        now = time.time()
        document: dict[str, Any] = {
            "format": FORMAT,
            "run_id": run_id,
            "status": RunState.PENDING.value,
            "error": None,
            "supervisor": _own_identity(),
            "runtime_dir": str(runtime_dir),
            "lives": 1,
            "started": now,
            "born": now,
            "lived_s": 0.0,
            "ended": None,
            "processes": {},
            "leftovers": [],
        }
        jsonl.write_json(run_dir / "state.json", document)
        return cls(run_dir, document)

    @classmethod
    def load(cls, run_dir: Path) -> Record:
        """Take up the record of an existing run."""
        return cls(run_dir, json.loads((run_dir / "state.json").read_text()))

    @property
    def run_id(self) -> str:
        return str(self._document["run_id"])

    def begin_again(self, *, runtime_dir: Path, reason: str) -> None:
        """Begin another life of the run, owned by this process."""
        latest = jsonl.tail(self._run_dir / "events.jsonl", LAST_EVENT_BYTES)
        lived_s = wall_seconds(self._document, now=latest[-1].get("time") if latest else None) or 0.0
        if not self.status.is_final:
            self.close_processes(kind=ExitKind.LOST, reason=SUPERVISOR_KILLED)
            self.move(RunState.FAILED, actor="resume", reason=SUPERVISOR_KILLED)
        before = self.status
        self._document |= {
            "status": RunState.PENDING.value,
            "error": None,
            "supervisor": _own_identity(),
            "runtime_dir": str(runtime_dir),
            "lives": self._document["lives"] + 1,
            "born": time.time(),
            "lived_s": lived_s,
            "ended": None,
            "processes": {},
            "leftovers": [],
        }
        self.note("state", durable=True, **{"from": before}, to=RunState.PENDING, actor="user", reason=reason)
        self._save()

    @property
    def status(self) -> RunState:
        return RunState(self._document["status"])

    def move(self, to: RunState, *, actor: str, reason: str = "") -> None:
        """Bring the run to another state; an illegal transition raises."""
        before = self.status
        self._document["status"] = move_run(before, to).value
        if to.is_final:
            self._document["ended"] = time.time()
            self._document["error"] = reason if to is RunState.FAILED else None
        self.note("state", durable=True, **{"from": before.value}, to=to.value, actor=actor, reason=reason)
        self._save()

    def move_process(self, name: str, to: ProcessState, **facts: Any) -> None:
        """Bring one process to another state and remember what is known of it (pid, returncode, reason, ...)."""
        known = self._document["processes"].setdefault(name, {"state": ProcessState.PENDING.value})
        known.update(facts, state=move_process(ProcessState(known["state"]), to).value)
        self.note("process", name=name, state=to.value, **facts)
        self._save()

    def close_processes(self, *, kind: str, reason: str) -> None:
        """Mark every process that is not known to have ended as ended."""
        for name, known in self._document["processes"].items():
            state = ProcessState(known["state"])
            if state is ProcessState.BACKOFF:
                self.move_process(name, ProcessState.EXITED)
            elif state not in (ProcessState.PENDING, ProcessState.EXITED, ProcessState.FATAL):
                self.move_process(name, ProcessState.EXITED, kind=kind, reason=reason)

    def is_complete(self) -> bool:
        """Whether the controller has recorded the run's last step, in this life of the run."""
        events = jsonl.read(self._run_dir / "events.jsonl")
        started = max((i for i, event in enumerate(events) if event.get("to") == RunState.STARTING), default=0)
        return any(event.get("event") == "completed" for event in events[started:])

    def count(self, event: str) -> int:
        """How often that was noted, in all lives of the run."""
        return sum(line.get("event") == event for line in jsonl.read(self._run_dir / "events.jsonl"))

    def add_leftovers(self, leftovers: list[str]) -> None:
        """Remember what could not be removed."""
        self._document["leftovers"] = leftovers
        self.note("leftovers", leftovers=leftovers)
        self._save()

    def note(self, event: str, *, durable: bool = False, **facts: Any) -> None:
        """Append to the history; `durable` returns only once it is on disk."""
        self._unwritten.append({"time": time.time(), "event": event, **facts})
        with _tolerating_a_full_disk():
            while self._unwritten:
                jsonl.append(self._run_dir / "events.jsonl", self._unwritten[0], durable=durable)
                del self._unwritten[0]

    def _save(self) -> None:
        with _tolerating_a_full_disk():
            jsonl.write_json(self._run_dir / "state.json", self._document)


@contextmanager
def _tolerating_a_full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        with suppress(OSError):
            print(f"warning: the state of the run cannot be written: {error}", file=sys.stderr, flush=True)


def _own_identity() -> dict[str, Any]:
    owner = identify(os.getpid())
    return {"host": os.uname().nodename} | (asdict(owner) if owner else {"pid": os.getpid()})


def read_state(run_dir: Path) -> dict[str, Any] | None:
    """The snapshot of a run; None if there is none to read."""
    try:
        document = json.loads((run_dir / "state.json").read_text())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def unreadable(run_dir: Path) -> str:
    """What there is to say of a run whose snapshot is damaged or gone."""
    path = run_dir / "state.json"
    what = f"{path} cannot be read" if path.exists() else f"{run_dir} holds a run without its state.json"
    return f"{what}: put it back from a copy, or move the directory away (its checkpoints and logs stay of use)"


def holds_run(run_dir: Path) -> bool:
    """Whether a run was begun in that directory, whatever has become of its state."""
    return any((run_dir / name).exists() for name in BEGUN)


def owner_of(state: Mapping[str, Any]) -> Identity | None:
    """The supervisor that wrote a snapshot, where the system lets us tell one from another."""
    return Identity.of(state.get("supervisor", {}))


def is_supervised(run_dir: Path, supervisor: Identity) -> bool:
    """Whether the supervisor of a run lives. One that is not here does as long as the run is owned, and if its run is
    nowhere to be found, we cannot know."""
    if supervisor.is_here:
        return is_alive(supervisor)
    return is_owned(run_dir) or not run_dir.is_dir()
