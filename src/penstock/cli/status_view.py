"""The status of a run, for people."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.runs import STYLES, moment
from penstock.observe.notices import failures, notice
from penstock.observe.progress import clock, count, held_out, number, percent

Document = dict[str, Any]

GIB = 2**30
STACK_LINES = 8


def render(status: Document) -> RenderableType:
    """Everything, the most important first."""
    parts: list[RenderableType] = [_headline(status)]
    if status["error"]:
        parts += ["", Text(f"error: {status['error']}", style="red")]
    if status["leftovers"]:
        parts += ["", Text(f"left behind: {', '.join(map(str, status['leftovers']))}", style="red")]
    parts += ["", _processes(status["processes"])]
    for title, section in (
        ("progress", _progress(status)),
        ("latest decisions", _decisions(status["decisions"])),
        ("incidents", _incidents(status["incidents"])),
        ("alarms", _alarms(status["alarms"])),
        ("stalls", _stalls(status)),
        ("next", _next(status["next"])),
    ):
        if section is not None:
            parts += ["", Text(title, style="bold"), section]
    return Group(*parts)


def _headline(status: Document) -> Table:
    table = _grid()
    reason = f"  {status['reason']}" if status["reason"] and not status["error"] else ""
    table.add_row("run", Text(status["run_id"], style="bold"))
    table.add_row("status", Text.assemble((status["status"], STYLES.get(status["status"], "")), (reason, "dim")))
    table.add_row("environment", str(status["environment"] or "-"))
    table.add_row("started", f"{moment(status['started'])}, {clock(status['wall_seconds'])} of wall time")
    table.add_row("files", status["run_dir"])
    return table


def _processes(rows: list[Document]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    nodes = ["node"] if any(row["node"] for row in rows) else []
    for name in ("process", "state", *nodes):
        table.add_column(name, no_wrap=True)
    for name in ("pid", "age", "restarts", "cores", "memory"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("")
    for row in rows:
        ended = row["state"] in ("exited", "fatal", "backoff", "gone", "attached")
        gone = " (gone)" if row["alive"] is False and not ended else ""
        table.add_row(
            row["name"],
            Text(f"{row['state']}{gone}", "green" if row["alive"] else "red" if gone else "dim"),
            *([row["node"] or "-"] if nodes else []),
            str(row["pid"] or "-"),
            clock(row["age_seconds"]),
            str(row["restarts"] or "-"),
            "-" if row["cpu_cores"] is None else f"{row['cpu_cores']:.2f}",
            "-" if row["rss_bytes"] is None else f"{row['rss_bytes'] / GIB:.2f} GiB",
            Text(row["reason"] or "", style="dim"),
        )
    return table


def _progress(status: Document) -> Table:
    facts, table = status["progress"], _grid()
    since = "" if facts["last_step_at"] is None else f", the last {_ago(facts['last_step_at'])}"
    table.add_row("phase", facts["phase"])
    table.add_row(facts["unit"], f"{facts['step']}/{facts['steps'] or '?'}{since}   ETA {clock(facts['eta_seconds'])}")
    rate = facts["episodes_per_second"]
    if facts["step"] and status["pipeline"] == "rollout":
        generated = count(facts["tokens_generated_per_second"])
        table.add_row("played", f"{facts['episodes']} trajectories, {count(rate)}/s, {generated} tokens/s")
        table.add_row("reward", number(facts["reward"]))
    elif facts["step"] and status["pipeline"] == "train":
        table.add_row("samples", f"{facts['samples']} trained, {facts['episodes']} played, {count(rate)}/s")
        table.add_row("reward", number(facts["reward"]))
        staleness = f"{number(facts['staleness_mean'])} (at most {number(facts['staleness_max'])})"
        table.add_row("staleness", f"{staleness}   version {facts['policy_version']}")
        generated, trained = facts["tokens_generated_per_second"], facts["tokens_trained_per_second"]
        table.add_row("tokens/s", f"{count(generated)} generated, {count(trained)} trained")
        busy = f"trainer {percent(facts['trainer_busy_fraction'])}, "
        table.add_row("busy", f"{busy}generator {percent(facts['generator_busy_fraction'])}")
    elif facts["episodes"]:
        table.add_row("played", f"{facts['episodes']} trajectories")
    if facts["held_out"]:
        table.add_row("validation", f"{facts['held_out']['ended']} of {facts['held_out']['tasks']} tasks played")
    if status["evaluations"]:
        table.add_row("held out", held_out(status["evaluations"]))
    for tag, found in status["tags"].items() if len(status["tags"]) > 1 else ():
        rewards = f"reward {number(found['reward'])}, held out {number((found['held_out'] or {}).get('reward'))}"
        length = found["response_tokens"]
        table.add_row(tag, rewards + (f", {count(length)} tokens an answer" if length is not None else ""))
    for reason, dropped in sorted(status["groups_dropped"].items(), key=lambda item: -item[1]):
        table.add_row("filtered", f"{dropped} groups  {reason}")
    if surplus := status["ledger"].get("discarded_surplus"):
        table.add_row("surplus", f"{count(surplus)} trajectories more than their groups needed (env.redundancy)")
    if status["groups_failed"]:
        table.add_row("failures", Text(failures(status["groups_failed"], status["latest_failure"])))
    if status["checkpoint"]:
        table.add_row("checkpoint", status["checkpoint"])
    return table


def _decisions(decisions: list[Document]) -> Table | None:
    if not decisions:
        return None
    table = _grid()
    for line in reversed(decisions):
        inputs = [f"{key} {_short(value)}" for key, value in line.items() if key not in ("decider", "time", "reason")]
        table.add_row(line["decider"], Text.assemble(line["reason"], (f"  {', '.join(inputs)}", "dim")))
    return table


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _incidents(incidents: list[Document]) -> Table | None:
    if not incidents:
        return None
    table = _grid()
    for incident in reversed(incidents):
        table.add_row(_ago(incident["time"]), notice(incident))
    return table


def _alarms(alarms: list[Document]) -> Table | None:
    if not alarms:
        return None
    table = _grid()
    for alarm in reversed(alarms):
        table.add_row(_ago(alarm["time"]), Text(alarm["reason"], style="yellow"))
    return table


def _stalls(status: Document) -> Table | None:
    if not status["stalls"]:
        return None
    table = _grid()
    for stall in reversed(status["stalls"]):
        waited = f"{stall.get('waiter')} waited {stall.get('seconds', 0.0):g} s for {stall.get('resource')}"
        table.add_row(_ago(stall["time"]), Text(f"{waited}, held by {stall.get('holder')}", style="red"))
    newest = status["stalls"][-1]
    for line in "\n".join(newest.get("stacks", [])[:1]).splitlines()[:STACK_LINES]:
        table.add_row("", Text(line, style="dim", overflow="ellipsis", no_wrap=True))
    log = f"logs/{newest.get('process')}.log"
    also = f", {log}" if Path(status["run_dir"], log).exists() else ""
    table.add_row("", Text(f"all stacks: {status['run_dir']}/events.jsonl (event stall){also}", style="dim"))
    return table


def _next(commands: list[Document]) -> Text | None:
    """To be copied as they are."""
    if not commands:
        return None
    lines = [Text.assemble(line["command"], (f"  # {line['purpose']}", "dim")) for line in commands]
    return Text("\n").join(lines)


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    return table


def _ago(moment_s: float) -> str:
    return f"{clock(max(0.0, time.time() - moment_s))} ago"
