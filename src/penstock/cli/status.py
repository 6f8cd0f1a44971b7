"""`penstock status`: what a run's own files and the process table tell, as one document with keys that stay."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from penstock.cli.console import open_console
from penstock.cli.polling import claim_answer, refusal
from penstock.cli.runs import config_of, has_ended, in_short, name_of
from penstock.cli.status_view import render
from penstock.config import Config
from penstock.observe import jsonl
from penstock.observe.notices import notice
from penstock.observe.summary import EVALUATION, PLAYED
from penstock.observe.view import Plan, RunView
from penstock.supervisor.child import CONFIG_ERROR, GAVE_UP
from penstock.supervisor.procfs import Identity, is_alive
from penstock.supervisor.record import read_state

Document = dict[str, Any]

METRICS_BYTES = 262_144
TIMELINE_BYTES = 1_048_576
NUM_INCIDENTS, NUM_ALARMS, NUM_STALLS = 8, 5, 3
SAMPLE_S = 0.2
"""Between the two looks that tell how busy a processor is."""
WATCH_EVERY_S = 1.0


def answer(run_dir: Path, *, as_json: bool, watch: bool, force: bool) -> None:
    """Print the status, once or until the run has ended. People are always answered, programs as often as allowed."""
    console = open_console()
    is_program = as_json or not console.is_terminal
    interval_s = config_of(run_dir).get("supervisor", {}).get("status_interval_s", 0.0)
    if is_program and interval_s > 0:
        wait_s = claim_answer(run_dir, now=time.time(), interval_s=interval_s, force=force)
        if wait_s > 0:
            print(jsonl.dumps(refusal(run_dir.name, wait_s, interval_s)))
            return
    if watch:
        follow(run_dir, console, quiet=as_json)
    document = status(run_dir)
    if as_json:
        print(jsonl.dumps(document))
    else:
        console.print(render(document))


def follow(run_dir: Path, console: Console, *, quiet: bool) -> None:
    """Until the run has ended: redrawn in a terminal, elsewhere a line whenever its phase or step is another one."""
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
    """Everything there is to say about a run. Its keys are those that `--json` promises."""
    state = read_state(run_dir) or {}
    config, events = config_of(run_dir), jsonl.read(run_dir / "events.jsonl")
    lines = jsonl.tail(run_dir / "metrics.jsonl", METRICS_BYTES)
    short = in_short(run_dir, state, config, lines)
    view = _view(_plan(config, short["steps"]), events, lines)
    view.status, view.played = short["status"], jsonl.read_json(run_dir / PLAYED)
    last_step = max(view.latest.get("time", 0.0), state.get("born", 0.0))
    document: Document = {
        **{key: short[key] for key in ("run_id", "status", "environment", "started", "wall_seconds", "run_dir")},
        "ended": state.get("ended"),
        "reason": _last_reason(events),
        "error": state.get("error"),
        "pipeline": view.plan.pipeline,
        "root_cause": _root_cause(state, events),
        "leftovers": state.get("leftovers", []),
        "processes": processes(short["status"], state, events),
        "progress": progress(view),
        "ledger": view.latest.get("ledger", {}),
        "groups_dropped": view.played.get("groups_dropped", view.latest.get("groups_dropped", {})),
        "groups_failed": view.played.get("groups_failed", 0),
        "latest_failure": view.played.get("latest_failure"),
        "evaluations": view.evaluations,
        "tags": view.tags,
        "checkpoint": view.checkpoint,
        "decisions": decisions(jsonl.tail(run_dir / "timeline.jsonl", TIMELINE_BYTES)),
        "incidents": [incident(event) for event in events if is_incident(event)][-NUM_INCIDENTS:],
        "alarms": [_without_kind(event) for event in events if event.get("event") == "alarm"][-NUM_ALARMS:],
        "stalls": [_without_kind(event) for event in events if is_lasting_stall(event, last_step)][-NUM_STALLS:],
    }
    return document | {"next": next_commands(document)}


def _plan(config: Mapping[str, Any], num_steps: int | None) -> Plan:
    """Of the settings that were written down, or what can be said of those that this version does not understand."""
    try:
        return Plan.of(Config.model_validate(config))
    except ValidationError:
        return Plan(pipeline=config.get("pipeline", "train"), num_steps=num_steps or 0)


def _view(plan: Plan, events: Sequence[Document], lines: Sequence[Document]) -> RunView:
    view = RunView(plan=plan)
    for event in events:
        view.see_event(event)
    for line in lines:
        view.see_step(line)
    return view


def progress(view: RunView) -> Document:
    """How far the run is, and how fast; rates are over the last seconds."""
    latest = view.latest
    return {
        "phase": view.phase,
        "needs": view.needs,
        "unit": view.unit,
        "step": view.step,
        "steps": view.plan.num_steps,
        "policy_version": latest.get("policy_version"),
        "samples": latest.get("ledger", {}).get("trained", 0),
        "episodes": view.played.get("episodes_total", latest.get("episodes_total", 0)),
        "held_out": view.played.get("held_out"),
        "steps_per_second": view.rate("step"),
        "episodes_per_second": view.rate("episodes_total"),
        "tokens_generated_per_second": view.rate("tokens_generated_total"),
        "tokens_trained_per_second": view.rate("tokens_trained_total"),
        "reward": view.reward,
        "entropy": latest.get("entropy"),
        "staleness_mean": latest.get("staleness_mean"),
        "staleness_max": latest.get("staleness_max"),
        "trainer_busy_fraction": view.trainer_busy,
        "generator_busy_fraction": view.generator_busy,
        "eta_seconds": view.eta_s if view.advances else None,
        "last_step_at": latest.get("time"),
    }


def processes(status: str, state: Mapping[str, Any], events: Sequence[Document]) -> list[Document]:
    """The supervisor, its processes in the order they were started, and environment workers that attached."""
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
        "pid": facts.get("pid"),
        "node": facts.get("node"),
        "restarts": facts.get("restarts", 0),
        "returncode": facts.get("returncode"),
        "reason": facts.get("reason"),
        "age_seconds": None,
        "cpu_seconds": None,
        "cpu_cores": None,
        "rss_bytes": None,
    }


def _measure(rows: Sequence[Document]) -> None:
    """Age, processor and memory of living processes."""
    looks = [(row, *look) for row in rows if (look := _look(row["pid"])) is not None]
    started = time.monotonic()
    time.sleep(SAMPLE_S if looks else 0.0)
    for row, process, cpu_s in looks:
        try:
            with process.oneshot():
                times, memory, born = process.cpu_times(), process.memory_info(), process.create_time()
        except psutil.Error:
            continue
        now_s = times.user + times.system
        row["age_seconds"] = round(time.time() - born, 1)
        row["cpu_seconds"] = round(now_s, 2)
        row["cpu_cores"] = round((now_s - cpu_s) / (time.monotonic() - started), 2)
        row["rss_bytes"] = memory.rss


def _look(pid: int) -> tuple[psutil.Process, float] | None:
    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
    except psutil.Error:
        return None
    return process, times.user + times.system


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
    """The latest decision of each decider, the newest last."""
    latest = {line["decider"]: line for line in timeline if line.get("kind") == "decision"}
    return [_without_kind(line) for line in sorted(latest.values(), key=lambda line: line["time"])]


def is_incident(event: Document) -> bool:
    """Whether something was lost, or has been recovered from; alarms and stalls have lists of their own."""
    return event.get("event") not in ("alarm", "stall") and notice(event) is not None


def is_lasting_stall(event: Document, last_step: float) -> bool:
    """Whether somebody was stuck, and the run has taken no step since (`last_step`: seconds since the epoch)."""
    return event.get("event") == "stall" and event["time"] > last_step


def incident(event: Document) -> Document:
    """What is told of it."""
    return {
        key: value for key, value in event.items() if key not in ("role", "start_ticks", "boot_id", "pid_namespace")
    }


def _without_kind(record: Document) -> Document:
    return {key: value for key, value in record.items() if key not in ("event", "kind")}


def _last_reason(events: Sequence[Document]) -> str | None:
    reasons = [event.get("reason") for event in events if event.get("event") == "state"]
    return reasons[-1] or None if reasons else None


def _root_cause(state: Mapping[str, Any], events: Sequence[Document]) -> Document | None:
    """The process that a failed run failed by: the one that decided its state."""
    actors = [event.get("actor") for event in events if event.get("event") == "state" and event.get("to") == "failed"]
    if state.get("status") != "failed" or not actors or actors[-1] not in state.get("processes", {}):
        return None
    name = actors[-1]
    return {
        "process": name,
        "message": str(state.get("error") or "").partition("\n")[0],
        "returncode": state["processes"][name].get("returncode"),
        "log": f"logs/{name}.log",
    }


def next_commands(document: Document) -> list[Document]:
    """What one would type now, and what for."""
    run_dir, cause = Path(document["run_dir"]), document["root_cause"]
    run = name_of(run_dir)
    anew = "play what is left" if document["pipeline"] == "rollout" else "begin it again"
    where = f"go on from {document['checkpoint']}" if document["checkpoint"] else anew
    resume = {"command": f"penstock resume {run}", "purpose": where}
    match document["status"]:
        case "completed" if document["pipeline"] == "eval":
            return [{"command": f"cat {run_dir / EVALUATION}", "purpose": "read what was found"}]
        case "completed" if document["pipeline"] == "rollout":
            return [{"command": f"penstock trajectories {run}", "purpose": "read what was played"}]
        case "completed":
            model = run_dir / document["checkpoint"] if document["checkpoint"] else None
            return [{"command": f"penstock serve --model {model}", "purpose": "talk to the trained policy"}] * bool(
                model
            )
        case "failed":
            process = f" {cause['process']}" if cause else ""
            logs = {"command": f"penstock logs {run}{process} -n 100", "purpose": "see what it said last"}
            return [logs] if cause and cause["returncode"] in (CONFIG_ERROR, GAVE_UP) else [logs, resume]
        case "stopped":
            return [resume]
        case "unknown" | "unreadable":
            return []
        case "suspended":
            pid = document["processes"][0]["pid"]
            return [
                {"command": f"kill -CONT {pid}", "purpose": "let its supervisor go on"},
                {"command": f"penstock stop {run} --now", "purpose": "kill it; it can be resumed"},
            ]
        case status if has_ended(status):
            return [{"command": f"penstock stop {run}", "purpose": "end what is left of it"}, resume]
    commands = [
        {"command": f"penstock logs {run} -f", "purpose": "follow its processes"},
        {"command": f"penstock stop {run}", "purpose": "stop it; it can be resumed"},
    ]
    if needed := document["progress"]["needs"]:
        commands.insert(0, {"command": needed, "purpose": "attach an environment worker"})
    return commands
