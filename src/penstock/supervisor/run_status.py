"""The status of a run: one document with stable keys, from its files and the process table.

`penstock status` reads it once. `penstock status --watch` and the dashboard keep a `StatusReader`, which reads only
what was added to the files since its last answer.
"""

from __future__ import annotations

import re
import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

import psutil
from pydantic import ValidationError

from penstock.config import Config
from penstock.observe import jsonl
from penstock.observe.closing_report import from_here
from penstock.observe.notices import notice
from penstock.observe.summary import EVALUATION, PLAYED
from penstock.observe.view import Plan, RunView
from penstock.own_files import is_ours
from penstock.supervisor.child import CONFIG_ERROR, GAVE_UP
from penstock.supervisor.known_runs import config_of, has_ended, name_of, short_status
from penstock.supervisor.procfs import Identity, is_alive
from penstock.supervisor.run_journal import read_state

Document = dict[str, Any]

EVENTS_BYTES = 64 * 2**20
"""Bytes read at once from the end of each file of the run: no file, however large, fills the memory. The history of a
run is shorter than this, or its oldest events are left out. Less is read of the run of another user."""
METRICS_BYTES = 262_144
TIMELINE_BYTES = 1_048_576
NUM_INCIDENTS, NUM_ALARMS, NUM_STALLS, NUM_ADAPTED = 8, 5, 3, 3
NUM_SHORT_LINES = 16
"""Number of the last metrics lines in which the latest reward is looked for."""
KEPT_OF_SUMMARY = ("run_id", "status", "environment", "simulated", "started", "wall_seconds", "run_dir")
"""Keys that the status has from the summary of the run."""
IDENTITY = ("role", "start_ticks", "boot_id", "pid_namespace")
"""Fields of a process event that mean nothing to a user."""
SAMPLE_S = 0.2
"""Seconds between the two samples that give the processor use."""
DECIDER = re.compile(rb'"decider": ?"((?:[^"\\]|\\.)*)"')
"""The decider in a line of timeline.jsonl."""
DAMAGED = (ArithmeticError, AttributeError, KeyError, LookupError, TypeError, ValueError)
"""What a record raises that no run wrote, when it is read."""


def status(run_dir: Path) -> Document:
    """Return the full status of a run. Its keys are those that `penstock status --json` promises."""
    return StatusReader(run_dir).read(sample_s=SAMPLE_S)


class StatusReader:
    """Reads the status of one run again and again. It remembers what it has read of growing files."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._meter = ProcessMeter()
        self._config: dict[str, Any] = {}
        self._config_stamp: tuple[int, ...] | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin at the ends of the files."""
        at = self._run_dir
        self._events = jsonl.Follower(at / "events.jsonl", last_bytes=EVENTS_BYTES)
        self._metrics = jsonl.Follower(at / "metrics.jsonl", last_bytes=METRICS_BYTES)
        self._timeline = jsonl.Follower(at / "timeline.jsonl", last_bytes=TIMELINE_BYTES)
        self._read_config()
        self._view = RunView(plan=_plan(self._config, self._config.get("trainer", {}).get("steps")))
        self._history = History()
        self._latest_lines: deque[Document] = deque(maxlen=NUM_SHORT_LINES)
        self._decisions: dict[str, Document] = {}
        self._damaged: Counter[str] = Counter()

    def read(self, *, sample_s: float = 0.0) -> Document:
        """Return the status as it is now. With `sample_s`, wait this long to measure the processor use of processes
        that the last answer did not show; without, it is None for them."""
        self._read_new()
        run_dir, view, history = self._run_dir, self._view, self._history
        state = read_state(run_dir) or {}
        short = short_status(run_dir, state, self._config, list(self._latest_lines))
        view.status, view.played = short["status"], jsonl.read_json(run_dir / PLAYED)
        last_step = max(view.latest.get("time", 0.0), state.get("born", 0.0))
        document: Document = {
            **{key: short[key] for key in KEPT_OF_SUMMARY},
            "ended": state.get("ended"),
            "sandbox": (self._config.get("env") or {}).get("sandbox"),
            "reason": history.reason,
            "error": state.get("error"),
            "pipeline": view.plan.pipeline,
            "root_cause": _root_cause(state, history.failed_actor),
            "leftovers": state.get("leftovers", []),
            "processes": self._processes(short["status"], state, sample_s),
            "progress": view.progress,
            "ledger": view.latest.get("ledger", {}),
            "metrics_url": None if has_ended(short["status"]) else history.metrics_url,
            "servers_by_transport": view.latest.get("servers_by_transport", {}),
            "groups_dropped": view.played.get("groups_dropped", view.latest.get("groups_dropped", {})),
            "refused_requests": view.played.get("refused_requests_total", 0),
            "frames_dropped": view.played.get("frames_dropped", {}),
            "groups_failed": view.played.get("groups_failed", 0),
            "latest_failure": view.played.get("latest_failure"),
            "evaluations": view.evaluations,
            "tags": view.tags,
            "checkpoint": view.checkpoint,
            "decisions": self.decisions,
            "tuned": history.tuned,
            "adapted": list(history.adapted),
            "incidents": list(history.incidents),
            "alarms": list(history.alarms),
            "stalls": [stall for stall in history.stalls if stall["time"] > last_step],
            "warnings": self.warnings,
        }
        commands = next_commands(document)
        return document | {"next": [{"command": command, "purpose": purpose} for command, purpose in commands.items()]}

    @property
    def decisions(self) -> list[Document]:
        """Return the latest decision of each decider, the newest last."""
        return sorted(self._decisions.values(), key=lambda line: line["time"])

    @property
    def warnings(self) -> list[str]:
        """Return what could not be read, one sentence for each file."""
        followers = {"events.jsonl": self._events, "metrics.jsonl": self._metrics}
        found = {name: follower.num_damaged + self._damaged[name] for name, follower in followers.items()}
        return [f"{name}: {number} damaged lines" for name, number in found.items() if number]

    def _read_new(self) -> None:
        """Read what was added to the files. If one is not the file that it was, read all of them again."""
        if any(follower.is_replaced() for follower in (self._events, self._metrics, self._timeline)):
            self._begin()
        if self._read_config():
            self._view.plan = _plan(self._config, self._view.plan.num_steps)
        self._take("events.jsonl", self._events, self._see_event)
        self._take("metrics.jsonl", self._metrics, self._see_step)
        self._decisions |= latest_decisions(self._timeline.read_new_bytes())

    def _take(self, name: str, follower: jsonl.Follower, see: Callable[[Document], None]) -> None:
        for record in follower.read_new():
            try:
                see(record)
            except DAMAGED:
                self._damaged[name] += 1

    def _see_event(self, event: Document) -> None:
        self._history.see(event)
        self._view.see_event(event)

    def _see_step(self, line: Document) -> None:
        if not all(isinstance(line[key], int | float) for key in ("step", "time")):
            raise ValueError("a line of a step has a step and a time")
        self._view.see_step(line)
        self._latest_lines.append(line)

    def _read_config(self) -> bool:
        """Read the settings if their file has changed; return whether it has."""
        stamp = None
        with suppress(OSError):
            found = (self._run_dir / "config.yaml").lstat()
            stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
        if stamp == self._config_stamp:
            return False
        self._config, self._config_stamp = config_of(self._run_dir), stamp
        return True

    def _processes(self, status: str, state: Mapping[str, Any], sample_s: float) -> list[Document]:
        """Return the supervisor, its processes in the order they were started, and attached environment workers."""
        supervisor = {"role": "supervisor", "devices": [], **state.get("supervisor", {})}
        known = [("supervisor", supervisor), *state.get("processes", {}).items()]
        rows = [_process(name, facts) for name, facts in known]
        self._meter.measure([row for row in rows if row["alive"]], sample_s)
        if not has_ended(status):
            rows += [_process(name, {"role": "env", "state": "attached"}) for name in self._history.attached]
        return rows


class History:
    """What the status shows of the events. Pass it the events in the order they were written."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Reason of the last change of the run's state."""
        self.failed_actor: str | None = None
        """Process, or other actor, of the last change to `failed`."""
        self.metrics_url: str | None = None
        """Address at which Prometheus scrapes the run."""
        self.attached: dict[str, None] = {}
        """Attached environment workers, in order."""
        self.tuned: dict[str, Document] = {}
        """The settings that tuning has changed, by name: the value in force, since when, and why."""
        self.adapted: deque[Document] = deque(maxlen=NUM_ADAPTED)
        self.incidents: deque[Document] = deque(maxlen=NUM_INCIDENTS)
        self.alarms: deque[Document] = deque(maxlen=NUM_ALARMS)
        self.stalls: deque[Document] = deque(maxlen=NUM_STALLS)

    def see(self, event: Document) -> None:
        """Take one event."""
        match event:
            case {"event": "state", "to": to}:
                self.reason = event.get("reason") or None
                if to == "failed":
                    self.failed_actor = event.get("actor")
                if to == "starting":
                    self.attached.clear()
            case {"event": "metrics", "url": str(url)}:
                self.metrics_url = url
            case {"event": "attached", "name": str(name)}:
                self.attached[name] = None
            case {"event": "left", "name": str(name)}:
                self.attached.pop(name, None)
            case {"event": "alarm", "reason": str(), "time": int() | float()}:
                self.alarms.append(_without(event, "event"))
            case {"event": "stall", "time": int() | float()}:
                self.stalls.append(_without(event, "event"))
        if is_adaptation(event):
            self._adapt(event)
        if is_incident(event):
            self.incidents.append(_without(event, *IDENTITY))

    def _adapt(self, event: Document) -> None:
        self.adapted.append(_without(event, "event"))
        for name, (_, value) in event["changes"].items():
            if "." in name:  # thresholds, which feedback changes, are no settings
                about = {key: event.get(key) for key in ("time", "policy_version", "reason")}
                self.tuned[name] = {"value": value, **about}


class ProcessMeter:
    """Measures living processes. Processor use is that since the last measurement."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, float], psutil.Process] = {}
        """By pid and time of creation."""

    def measure(self, rows: Sequence[Document], sample_s: float) -> None:
        """Add age, processor use and memory to the rows of living processes."""
        found: list[tuple[Document, psutil.Process]] = []
        is_new = False
        before, self._known = self._known, {}
        for row in rows:
            with suppress(psutil.Error):
                process = psutil.Process(row["pid"])
                key = (process.pid, process.create_time())
                if key not in before:
                    process.cpu_percent()  # the next call measures the time since this one
                    is_new = True
                self._known[key] = before.get(key, process)
                found.append((row, self._known[key]))
        if is_new:
            time.sleep(sample_s)
        for row, process in found:
            with suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                is_measured = sample_s > 0 or (process.pid, process.create_time()) in before
                row["cpu_cores"] = round(process.cpu_percent() / 100, 2) if is_measured else None
                row["cpu_seconds"] = round(times.user + times.system, 2)
                row["age_seconds"] = round(time.time() - process.create_time(), 1)
                row["rss_bytes"] = process.memory_info().rss


def latest_decisions(data: bytes) -> dict[str, Document]:
    """Return the last decision of each decider in whole lines of timeline.jsonl. Only these lines are parsed."""
    ends: dict[bytes, int] = {found[1]: found.start() for found in DECIDER.finditer(data)}
    decisions: dict[str, Document] = {}
    for place in ends.values():
        line = jsonl.parse(data[data.rfind(b"\n", 0, place) + 1 : data.find(b"\n", place)]) or {}
        match line:
            case {"kind": "decision", "decider": str(decider), "time": int() | float(), "reason": str()}:
                decisions[decider] = _without(line, "kind")
    return decisions


def _plan(config: Mapping[str, Any], num_steps: int | None) -> Plan:
    """Return the plan from the written settings, or a reduced plan if this version does not understand them."""
    try:
        return Plan.of(Config.model_validate(config))
    except ValidationError:
        return Plan(pipeline=config.get("pipeline", "train"), num_steps=num_steps or 0)


def _process(name: str, facts: Mapping[str, Any]) -> Document:
    identity = Identity.of(facts)
    alive = identity is not None and is_alive(identity)
    return {
        "name": name,
        "role": facts.get("role", name.partition("-")[0]),
        "state": facts.get("state", "running" if alive else "gone"),
        "alive": alive if identity is None or identity.is_here else None,
        "restarts": facts.get("restarts", 0),
        **{key: facts.get(key) for key in ("pid", "node", "returncode", "reason")},
        "devices": _devices(facts.get("devices")),
        **dict.fromkeys(("age_seconds", "cpu_seconds", "cpu_cores", "rss_bytes")),
    }


def _devices(written: object) -> list[Document] | None:
    """Return the accelerators of a process; empty if it computes on the CPU, None if they are not known."""
    if not isinstance(written, list):
        return None
    known = []
    for each in written:
        match each:
            case {"name": str(name), "number": str(number), "used_bytes": int(used), "total_bytes": int(total)}:
                known.append({"name": name, "number": number, "used_bytes": used, "total_bytes": total})
            case _:
                return None
    return known


MAX_CHANGES = 16
"""Most settings that change at once. An event with more is not one of a controller."""


def is_adaptation(event: Document) -> bool:
    """Return whether an event is a whole record of changed settings: each with the value before and the one after."""
    match event:
        case {"event": "adapted", "time": float(), "reason": str(), "changes": dict(changes)}:
            if len(changes) > MAX_CHANGES:
                return False
            pairs = [pair if isinstance(pair, list) else [] for pair in changes.values()]
            values = (int, float, str, NoneType)
            return all(len(pair) == 2 and all(isinstance(each, values) for each in pair) for pair in pairs)
    return False


def is_incident(event: Document) -> bool:
    """Return whether an event is a loss or a recovery; alarms and stalls have separate lists."""
    return event.get("event") not in ("alarm", "stall") and notice(event) is not None


def _without(record: Document, *keys: str) -> Document:
    return {key: value for key, value in record.items() if key not in keys}


def _root_cause(state: Mapping[str, Any], actor: str | None) -> Document | None:
    """Return the process that made the run fail: the actor of its last change to failed. None if no process did."""
    if state.get("status") != "failed" or actor is None or actor not in state.get("processes", {}):
        return None
    return {
        "process": actor,
        "message": str(state.get("error") or "").partition("\n")[0],
        "returncode": state["processes"][actor].get("returncode"),
        "log": f"logs/{actor}.log",
    }


def next_commands(document: Document) -> dict[str, str]:
    """Return the commands to suggest now, with their purposes. The shell takes names from files of the run as names: a
    run may be that of another user."""
    if document["simulated"] and has_ended(document["status"]):
        return {}
    run_dir, cause, checkpoint = Path(document["run_dir"]), document["root_cause"], document["checkpoint"]
    run = shlex.quote(name_of(run_dir))
    restart = "play the remaining tasks" if document["pipeline"] == "rollout" else "start it again"
    resume = {f"penstock resume {run}": f"continue from {checkpoint}" if checkpoint else restart}
    match document["status"]:
        case "completed" if document["pipeline"] == "eval":
            return {f"cat {_quoted(run_dir / EVALUATION)}": "read the results"}
        case "completed" if document["pipeline"] == "rollout":
            return {f"penstock trajectories {run}": "read the trajectories"}
        case "completed":
            read = {f"penstock trajectories {run} --best": "read its latest answers, the best first"}
            if not checkpoint or not (run_dir / checkpoint).is_dir():  # a copy of a run may lack its checkpoints
                return read
            directory = from_here(run_dir)
            model, config = _quoted(directory / checkpoint), _quoted(directory / "config.yaml")
            return read | {
                f"penstock serve --model {model}": "talk to the trained policy",
                f"penstock eval {config} --checkpoint {run}": "evaluate the trained policy again",
            }
        case "failed":
            process = f" {shlex.quote(cause['process'])}" if cause else ""
            logs = {f"penstock logs {run}{process} -n 100": "see the last lines of the log"}
            return logs if cause and cause["returncode"] in (CONFIG_ERROR, GAVE_UP) else logs | resume
        case "stopped":
            return resume
        case "unknown" | "unreadable":
            return {}
        case "suspended":
            wake = {f"kill -CONT {document['processes'][0]['pid']}": "let its supervisor continue"}
            return wake | {f"penstock stop {run} --now": "kill it; it can be resumed"}
        case status if has_ended(status):
            return {f"penstock stop {run}": "end its remaining processes"} | resume
    needed = document["progress"]["needs"] if is_ours(run_dir) else None  # a whole command from a file of the run
    attach = {needed: "attach an environment worker"} if needed else {}
    return {**attach, f"penstock logs {run} -f": "follow its log", f"penstock stop {run}": "stop it; it can be resumed"}


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
