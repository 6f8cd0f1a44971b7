"""`penstock status`: one document with stable keys, from a run's own files and the process table."""

from __future__ import annotations

import fcntl
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any

import psutil
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from penstock.cli.refusal import refuse
from penstock.cli.runs import config_of, has_ended, name_of, short_status
from penstock.cli.status_view import render
from penstock.config import Config
from penstock.observe import jsonl
from penstock.observe.closing_report import from_here
from penstock.observe.notices import notice
from penstock.observe.summary import EVALUATION, PLAYED
from penstock.observe.tables import open_console
from penstock.observe.view import Plan, RunView
from penstock.observe.visible_text import visible_json
from penstock.own_files import is_ours
from penstock.supervisor.child import CONFIG_ERROR, GAVE_UP
from penstock.supervisor.procfs import Identity, is_alive
from penstock.supervisor.run_journal import read_state

Document = dict[str, Any]

EVENTS_BYTES = 64 * 2**20
"""Bytes read from the end of each file of the run: no file, however large, fills the memory. The history of a run is
shorter than this, or its oldest events are left out. `jsonl.tail` reads less of the run of another user."""
METRICS_BYTES = 262_144
TIMELINE_BYTES = 1_048_576
NUM_INCIDENTS, NUM_ALARMS, NUM_STALLS, NUM_ADAPTED = 8, 5, 3, 3
IDENTITY = ("role", "start_ticks", "boot_id", "pid_namespace")
"""Fields of a process event that mean nothing to a user."""
SAMPLE_S = 0.2
"""Seconds between the two samples that give the processor use."""
WATCH_EVERY_S = 1.0
STAMP = ".status_answered"
"""File in the run directory with the time of the last answer to a program (seconds since the epoch)."""


def answer(run_dir: Path, *, as_json: bool, watch: bool, force: bool) -> None:
    """Print the status, once or until the run has ended. People always get an answer; programs get one as often as
    `supervisor.status_interval_s` allows. Exits with one error if a file of the run is no plain file, or holds what
    penstock does not write and belongs to another user."""
    try:
        _answer(run_dir, as_json=as_json, watch=watch, force=force)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise typer.Exit(refuse(f"the files of run {run_dir.name} cannot be read: {error}", 1)) from error
    except Exception as error:
        if is_ours(run_dir):
            raise
        reason = f"the files of {run_dir}, the run of another user, are damaged ({type(error).__name__})"
        raise typer.Exit(refuse(f"{reason}: ask its user", 1)) from error


def _answer(run_dir: Path, *, as_json: bool, watch: bool, force: bool) -> None:
    console = open_console()
    is_program = as_json or not console.is_terminal
    interval_s = config_of(run_dir).get("supervisor", {}).get("status_interval_s", 0.0)
    if is_program and is_ours(run_dir) and interval_s > 0:
        wait_s = claim_answer(run_dir, now=time.time(), interval_s=interval_s, force=force)
        if wait_s > 0:
            every = f"once every {interval_s:g} s (supervisor.status_interval_s)"
            message = f"run {run_dir.name} answers programs {every}: ask again in {wait_s:.0f} s, or use --force"
            facts = {"run_id": run_dir.name, "message": message, "next_check_in_seconds": round(wait_s, 1)}
            print(visible_json(jsonl.dumps({"rate_limited": True, **facts})))
            return
    if watch:
        follow(run_dir, console, quiet=as_json)
    document = status(run_dir)
    if as_json:
        print(visible_json(jsonl.dumps(document)))
    else:
        console.print(render(document))


def claim_answer(run_dir: Path, *, now: float, interval_s: float, force: bool = False) -> float:
    """Return 0 if this caller gets an answer, and record its time; otherwise return the seconds until the next answer
    is due. A last answer in the future came from a wrong clock and is ignored."""
    with (run_dir / STAMP).open("a+") as stamp:
        try:
            fcntl.flock(stamp, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another caller is being answered, or a reader of a shared run holds the lock
            return 0.0 if force else interval_s
        stamp.seek(0)
        answered = float(stamp.read() or "-inf")
        if not force and answered <= now < answered + interval_s:
            return answered + interval_s - now
        stamp.truncate(0)
        stamp.write(f"{now}\n")
    return 0.0


def follow(run_dir: Path, console: Console, *, quiet: bool) -> None:
    """Show the status until the run has ended. A terminal is redrawn; other output gets a line when the phase or step
    changes."""
    shown: tuple[str, int] | None = None
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while not has_ended((document := status(run_dir))["status"]):
            seen = document["progress"]["phase"], document["progress"]["step"]
            if console.is_terminal:
                live.update(render(document), refresh=True)
            elif not quiet and seen != shown:
                unit, total = document["progress"]["unit"], document["progress"]["steps"]
                console.print(f"{seen[0]}  {unit} {seen[1]}/{total or '?'}")
            shown = seen
            time.sleep(WATCH_EVERY_S)


def status(run_dir: Path) -> Document:
    """Return the full status of a run. Its keys are those that `--json` promises."""
    state = read_state(run_dir) or {}
    config, events = config_of(run_dir), jsonl.tail(run_dir / "events.jsonl", EVENTS_BYTES)
    lines = jsonl.tail(run_dir / "metrics.jsonl", METRICS_BYTES)
    short = short_status(run_dir, state, config, lines)
    view = RunView(plan=_plan(config, short["steps"]))
    for event in events:
        view.see_event(event)
    for line in lines:
        view.see_step(line)
    view.status, view.played = short["status"], jsonl.read_json(run_dir / PLAYED)
    changes = [event for event in events if event.get("event") == "state"]
    adaptations = [event for event in events if is_adaptation(event)]
    last_step = max(view.latest.get("time", 0.0), state.get("born", 0.0))
    document: Document = {
        **{key: short[key] for key in ("run_id", "status", "environment", "started", "wall_seconds", "run_dir")},
        "ended": state.get("ended"),
        "sandbox": (config.get("env") or {}).get("sandbox"),
        "reason": (changes[-1].get("reason") or None) if changes else None,
        "error": state.get("error"),
        "pipeline": view.plan.pipeline,
        "root_cause": _root_cause(state, changes),
        "leftovers": state.get("leftovers", []),
        "processes": processes(short["status"], state, events),
        "progress": view.progress,
        "ledger": view.latest.get("ledger", {}),
        "metrics_url": None if has_ended(short["status"]) else metrics_url(events),
        "servers_by_transport": view.latest.get("servers_by_transport", {}),
        "groups_dropped": view.played.get("groups_dropped", view.latest.get("groups_dropped", {})),
        "refused_requests": view.played.get("refused_requests_total", 0),
        "frames_dropped": view.played.get("frames_dropped", {}),
        "groups_failed": view.played.get("groups_failed", 0),
        "latest_failure": view.played.get("latest_failure"),
        "evaluations": view.evaluations,
        "tags": view.tags,
        "checkpoint": view.checkpoint,
        "decisions": decisions(jsonl.tail(run_dir / "timeline.jsonl", TIMELINE_BYTES)),
        "tuned": tuned(adaptations),
        "adapted": [_without(event, "event") for event in adaptations][-NUM_ADAPTED:],
        "incidents": [_without(event, *IDENTITY) for event in events if is_incident(event)][-NUM_INCIDENTS:],
        "alarms": [_without(event, "event") for event in events if event.get("event") == "alarm"][-NUM_ALARMS:],
        "stalls": [_without(event, "event") for event in events if is_lasting_stall(event, last_step)][-NUM_STALLS:],
    }
    commands = next_commands(document)
    return document | {"next": [{"command": command, "purpose": purpose} for command, purpose in commands.items()]}


def _plan(config: Mapping[str, Any], num_steps: int | None) -> Plan:
    """Return the plan from the written settings, or a reduced plan if this version does not understand them."""
    try:
        return Plan.of(Config.model_validate(config))
    except ValidationError:
        return Plan(pipeline=config.get("pipeline", "train"), num_steps=num_steps or 0)


def processes(status: str, state: Mapping[str, Any], events: Sequence[Document]) -> list[Document]:
    """Return the supervisor, its processes in the order they were started, and attached environment workers."""
    known = [("supervisor", {"role": "supervisor", **state.get("supervisor", {})}), *state.get("processes", {}).items()]
    rows = [_process(name, facts) for name, facts in known]
    _measure([row for row in rows if row["alive"]])
    if not has_ended(status):
        rows += [_process(name, {"role": "env", "state": "attached"}) for name in _attached(events)]
    return rows


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
        **dict.fromkeys(("age_seconds", "cpu_seconds", "cpu_cores", "rss_bytes")),
    }


def _measure(rows: Sequence[Document]) -> None:
    """Add age, processor use and memory to the rows of living processes."""
    found: list[tuple[Document, psutil.Process]] = []
    for row in rows:
        with suppress(psutil.Error):
            process = psutil.Process(row["pid"])
            process.cpu_percent()  # the next call measures the time since this one
            found.append((row, process))
    time.sleep(SAMPLE_S if found else 0.0)
    for row, process in found:
        with suppress(psutil.Error), process.oneshot():
            times = process.cpu_times()
            row["cpu_cores"] = round(process.cpu_percent() / 100, 2)
            row["cpu_seconds"] = round(times.user + times.system, 2)
            row["age_seconds"] = round(time.time() - process.create_time(), 1)
            row["rss_bytes"] = process.memory_info().rss


def metrics_url(events: Sequence[Document]) -> str | None:
    """Return the address at which Prometheus scrapes the run; None if there is none."""
    return next((event.get("url") for event in reversed(events) if event.get("event") == "metrics"), None)


def _attached(events: Sequence[Document]) -> list[str]:
    attached: dict[str, None] = {}
    for event in events:
        match event:
            case {"event": "state", "to": "starting"}:
                attached.clear()
            case {"event": "attached", "name": name}:
                attached[name] = None
            case {"event": "left", "name": name}:
                attached.pop(name, None)
    return list(attached)


def decisions(timeline: Sequence[Document]) -> list[Document]:
    """Return the latest decision of each decider, the newest last."""
    latest = {line["decider"]: line for line in timeline if line.get("kind") == "decision"}
    return [_without(line, "kind") for line in sorted(latest.values(), key=lambda line: line["time"])]


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


def tuned(adaptations: Sequence[Document]) -> dict[str, Document]:
    """Return the settings that tuning has changed, by name: the value in force, since when, and why."""
    found: dict[str, Document] = {}
    for event in adaptations:
        for name, (_, value) in event["changes"].items():
            if "." in name:  # thresholds, which feedback changes, are no settings
                about = {key: event.get(key) for key in ("time", "policy_version", "reason")}
                found[name] = {"value": value, **about}
    return found


def is_incident(event: Document) -> bool:
    """Return whether an event is a loss or a recovery; alarms and stalls have separate lists."""
    return event.get("event") not in ("alarm", "stall") and notice(event) is not None


def is_lasting_stall(event: Document, last_step: float) -> bool:
    """Return whether an event is a stall after which the run has taken no step (`last_step`: seconds since the
    epoch)."""
    return event.get("event") == "stall" and event["time"] > last_step


def _without(record: Document, *keys: str) -> Document:
    return {key: value for key, value in record.items() if key not in keys}


def _root_cause(state: Mapping[str, Any], changes: Sequence[Document]) -> Document | None:
    """Return the process that made the run fail: the actor of its last change to failed. None if no process did."""
    actors = [change.get("actor") for change in changes if change.get("to") == "failed"]
    name = actors[-1] if actors else None
    if state.get("status") != "failed" or name not in state.get("processes", {}):
        return None
    return {
        "process": name,
        "message": str(state.get("error") or "").partition("\n")[0],
        "returncode": state["processes"][name].get("returncode"),
        "log": f"logs/{name}.log",
    }


def next_commands(document: Document) -> dict[str, str]:
    """Return the commands to suggest now, with their purposes. The shell takes names from files of the run as names: a
    run may be that of another user."""
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
            if not checkpoint:
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
