"""What is shown when a run has ended: answers before and after, and the key figures of its summary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.observe import jsonl
from penstock.observe.notices import failures, notice
from penstock.observe.progress import clock, count, number, percent

LONGEST_CELL = 160
"""Characters of a prompt or an answer; longer ones are cut in their middle."""
NOTICES = 8
"""The latest are shown."""


def show(run_dir: Path, console: Console) -> None:
    """Print the report of a run whose summary has been written."""
    summary = json.loads((run_dir / "summary.json").read_text())
    events = jsonl.read(run_dir / "events.jsonl")
    evaluations = {e["when"]: e for e in events if e.get("event") == "evaluation" and e.get("samples")}
    checkpoints = [e["path"] for e in events if e.get("event") == "checkpoint"]
    if {"before", "after"} <= evaluations.keys():
        console.print(sample_table(evaluations["before"]["samples"], evaluations["after"]["samples"]))
    latest = next((e for e in reversed(events) if e.get("event") == "evaluation"), None)
    if latest is not None and is_worth_a_table(latest):
        console.print(evaluation_table(latest))
    console.print(key_figures(summary, run_dir, checkpoints))
    notices = [told for event in events if (told := notice(event)) is not None]
    if len(notices) > NOTICES:
        console.print(Text(f"{len(notices)} notices in events.jsonl, the latest of them:", "yellow"))
    for told in notices[-NOTICES:]:
        console.print(Text(f"! {told}", "yellow"))


def sample_table(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Table:
    """The same held-out tasks, answered before and after training."""
    table = Table(title="held-out tasks", title_justify="left", title_style="bold", border_style="dim")
    known = ["prompt", "expected"] if any(sample["expected"] for sample in before) else ["prompt"]
    for column in ("task", *known[1:], "before", "after"):
        table.add_column(column, overflow="fold")
    for first, last in zip(before, after, strict=False):
        table.add_row(*(Text(_one_line(first[name])) for name in known), _answer(first), _answer(last))
    return table


def is_worth_a_table(evaluation: dict[str, Any]) -> bool:
    """Whether it says more than one number does."""
    return len(evaluation.get("tags", {})) > 1 or len(evaluation.get("pass_at", {})) > 1


def evaluation_table(evaluation: dict[str, Any]) -> Table:
    """What held-out tasks came to, by tag."""
    title = "held-out tasks" if evaluation["when"] == "given" else f"held-out tasks, {evaluation['when']}"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    table.add_column("tag")
    ks = list(evaluation["pass_at"])
    for column in ("tasks", "reward", *(f"pass@{k}" for k in ks), "tokens", "turns", "truncated", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    tags = evaluation["tags"]
    for tag, found in [*tags.items(), *([("all", evaluation)] if len(tags) > 1 else [])]:
        chances = [number(found["pass_at"].get(k)) for k in ks]
        lengths = [count(found["response_tokens"]), number(found["turns"])]
        counts = [str(found["truncated"]), str(found["failed"])]
        table.add_row(Text(tag), str(found["tasks"]), number(found["reward"]), *chances, *lengths, *counts)
    return table


def key_figures(summary: dict[str, Any], run_dir: Path, checkpoints: Sequence[str]) -> Table:
    """The lines of the summary that people look for first."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    wall_s = summary["wall_seconds"]
    table.add_row("status", f"{summary['status']}" + (f" after {clock(wall_s)}" if wall_s else ""))
    if summary["eval_before"] is not None:
        table.add_row("held out", f"{number(summary['eval_before'])} → {number(summary['eval_after'])}")
    if "tasks" in summary:
        given_up = f", {summary['groups_failed']} given up" if summary["groups_failed"] else ""
        table.add_row("tasks", f"{summary['tasks_played']} of {summary['tasks']} tasks played{given_up}")
        table.add_row(
            "played", f"{count(summary['trajectories'])} trajectories, mean reward {number(summary['reward_mean'])}"
        )
        table.add_row("tokens", f"{count(summary['tokens_generated'])} generated")
        table.add_row("dump", Text(str(summary["dump"] or "-")))
    if summary["steps"]:
        table.add_row("reward", f"{number(summary['reward_first'])} → {number(summary['reward_last'])}")
        table.add_row("steps", f"{summary['steps']}, {count(summary['trajectories'])} trajectories")
        tokens = f"{count(summary['tokens_generated'])} generated, {count(summary['tokens_trained'])} trained"
        table.add_row("tokens", tokens)
        trainer, generator = summary["trainer_busy_fraction"], summary["generator_busy_fraction"]
        table.add_row("busy", f"trainer {percent(trainer)}, generator {percent(generator)}")
    if surplus := summary["ledger"].get("discarded_surplus"):
        table.add_row("surplus", f"{count(surplus)} trajectories more than their groups needed (env.redundancy)")
    if summary["groups_failed"]:
        table.add_row("failures", Text(failures(summary["groups_failed"], summary["latest_failure"])))
    table.add_row("files", Text(str(run_dir)))
    plots = [str(path.relative_to(run_dir)) for path in sorted((run_dir / "plots").glob("*.png"))]
    for name in [*checkpoints[-1:], *plots]:
        table.add_row("", Text(name))
    return table


def _answer(sample: dict[str, Any]) -> Text:
    reward = float(sample.get("reward") or 0.0)
    style = "green" if reward >= 0.99 else "yellow" if reward > 0 else "red"
    return Text.assemble(_one_line(sample.get("answer")), (f"  {reward:.2f}", style))


def _one_line(value: object) -> str:
    text = " ".join(str("" if value is None else value).split()) or "∅"
    half = LONGEST_CELL // 2
    return text if len(text) <= LONGEST_CELL else f"{text[:half]} … {text[-half:]}"
