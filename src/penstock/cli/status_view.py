"""The status of a run as text for a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.runs import STYLES, moment
from penstock.observe.closing_report import command_lines, troubles
from penstock.observe.notices import notice
from penstock.observe.progress import figures, held_out
from penstock.observe.tables import clock, count, facts, listing, number
from penstock.observe.visible_text import visible

Document = dict[str, Any]

GIB = 2**30
STACK_LINES = 8


def render(status: Document) -> RenderableType:
    """Return all parts of the status, the most important first."""
    parts: list[RenderableType] = [_headline(status)]
    if status["error"]:
        parts += ["", Text(visible(f"error: {status['error']}"), style="red")]
    if status["leftovers"]:
        parts += ["", Text(f"left behind: {', '.join(map(str, status['leftovers']))}", style="red")]
    parts += ["", _processes(status["processes"])]
    for title, section in (
        ("progress", facts(_progress(status))),
        ("latest decisions", _newest_first(status["decisions"], lambda line: (line["decider"], _decision(line)))),
        ("settings in force", facts(map(_tuned, status["tuned"].items())) if status["tuned"] else None),
        ("adapted", _newest_first(status["adapted"], lambda line: (_ago(line["time"]), _adapted(line)))),
        ("incidents", _newest_first(status["incidents"], lambda line: (_ago(line["time"]), notice(line) or ""))),
        ("alarms", _newest_first(status["alarms"], lambda line: (_ago(line["time"]), Text(line["reason"], "yellow")))),
        ("stalls", _stalls(status)),
        ("next", command_lines(status["next"]) if status["next"] else None),
    ):
        if section is not None:
            parts += ["", Text(title, style="bold"), section]
    return Group(*parts)


def _headline(status: Document) -> Table:
    reason = f"  {status['reason']}" if status["reason"] and not status["error"] else ""
    return facts(
        [
            ("run", Text(status["run_id"], style="bold")),
            ("status", Text.assemble((status["status"], STYLES.get(status["status"], "")), (reason, "dim"))),
            ("environment", str(status["environment"] or "-")),
            *([("simulated", Text(visible(str(status["simulated"].get("strategy")))))] if status["simulated"] else []),
            ("started", f"{moment(status['started'])}, {clock(status['wall_seconds'])} of wall time"),
            ("files", status["run_dir"]),
            *([("metrics", Text(visible(status["metrics_url"])))] if status["metrics_url"] else []),
        ]
    )


def _processes(rows: list[Document]) -> Table:
    nodes = ["node"] if any(row["node"] for row in rows) else []
    table = listing(("process", "state", *nodes), ("pid", "age", "restarts", "cores", "memory"))
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
            number(row["cpu_cores"]),
            "-" if row["rss_bytes"] is None else f"{row['rss_bytes'] / GIB:.2f} GiB",
            Text(row["reason"] or "", style="dim"),
        )
    return table


def _progress(status: Document) -> list[tuple[str, str]]:
    progress = status["progress"]
    since = "" if progress["last_step_at"] is None else f", the last {_ago(progress['last_step_at'])}"
    steps = f"{progress['step']}/{progress['steps'] or '?'}{since}   ETA {clock(progress['eta_seconds'])}"
    rows = {"phase": progress["phase"], progress["unit"]: steps}
    if progress["step"] and status["pipeline"] != "eval":
        if status["pipeline"] == "train":
            rows["samples"] = f"{progress['samples']} trained"
        rows |= {"played": f"{progress['episodes']} trajectories", "reward": number(progress["reward"])}
        rows |= figures(progress)
    elif progress["episodes"]:
        rows["played"] = f"{progress['episodes']} trajectories"
    if "staleness" in rows:
        rows["staleness"] += f" (at most {number(progress['staleness_max'])})"
        rows["played"] += f", {count(progress['episodes_per_second'])}/s"
    if progress["held_out"]:
        rows["validation"] = f"{progress['held_out']['ended']} of {progress['held_out']['tasks']} tasks played"
    if status["evaluations"]:
        rows["held out"] = held_out(status["evaluations"])
    for tag, found in status["tags"].items() if len(status["tags"]) > 1 else ():
        length = found["response_tokens"]
        rows[tag] = f"reward {number(found['reward'])}, held out {number((found['held_out'] or {}).get('reward'))}"
        rows[tag] += f", {count(length)} tokens an answer" if length is not None else ""
    ways = status["servers_by_transport"].items()
    if ways:
        rows["weights"] = ", ".join(f"{way.replace('_', ' ')} ({num_servers})" for way, num_servers in ways)
    dropped = sorted(status["groups_dropped"].items(), key=lambda item: -item[1])
    filtered = [("filtered", f"{num_groups} groups  {reason}") for reason, num_groups in dropped]
    checkpoint = [("checkpoint", status["checkpoint"])] if status["checkpoint"] else []
    num_refused = status["refused_requests"]
    why = f"{num_refused:g} requests of agents: the logs of env processes say why"
    told = [("refused", why)] if num_refused else []
    damaged = [("damaged", warning) for warning in status["warnings"]]
    return [*rows.items(), *filtered, *told, *bad_frames(status), *troubles(status), *damaged, *checkpoint]


def bad_frames(status: Document) -> list[tuple[str, str]]:
    """Return a line about the frames that the control bus dropped; empty if there are none."""
    found = status["frames_dropped"]
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(found.items()))
    return [("bus", f"{sum(found.values())} bad frames dropped: {reasons}")] if found else []


def _decision(line: Document) -> Text:
    inputs = {key: value for key, value in line.items() if key not in ("decider", "time", "reason")}
    shown = [f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in inputs.items()]
    return Text.assemble(line["reason"], (f"  {', '.join(shown)}", "dim"))


def _adapted(line: Document) -> Text:
    changes = [f"{name} {_value(before)} → {_value(after)}" for name, (before, after) in line["changes"].items()]
    return Text.assemble(", ".join(changes), (f"  {line['reason']}", "dim"))


def _tuned(setting: tuple[str, Document]) -> tuple[str, Text]:
    name, about = setting
    since = f"since version {about['policy_version']}, {_ago(about['time'])}: {about['reason']}"
    return name, Text.assemble(_value(about["value"]), (f"  {since}", "dim"))


def _value(value: float | str | None) -> str:
    if value is None:
        return "unset"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _newest_first(lines: list[Document], row: Callable[[Document], Sequence[RenderableType]]) -> Table | None:
    """Return a table with a row for each line, the newest first; None without lines."""
    return facts(map(row, reversed(lines))) if lines else None


def _stalls(status: Document) -> Table | None:
    """Return the stalls, with the beginning of the stack of the newest one; None if there are none."""

    def waited(stall: Document) -> tuple[str, Text]:
        text = f"{stall.get('waiter')} waited {stall.get('seconds', 0.0):g} s for {stall.get('resource')}"
        return _ago(stall["time"]), Text(f"{text}, held by {stall.get('holder')}", style="red")

    table = _newest_first(status["stalls"], waited)
    if table is None:
        return None
    newest = status["stalls"][-1]
    for line in "\n".join(newest.get("stacks", [])[:1]).splitlines()[:STACK_LINES]:
        table.add_row("", Text(line, style="dim", overflow="ellipsis", no_wrap=True))
    log = f"logs/{newest.get('process')}.log"
    also = f", {log}" if Path(status["run_dir"], log).exists() else ""
    table.add_row("", Text(f"all stacks: {status['run_dir']}/events.jsonl (event stall){also}", style="dim"))
    return table


def _ago(moment_s: float) -> str:
    return f"{clock(max(0.0, time.time() - moment_s))} ago"
