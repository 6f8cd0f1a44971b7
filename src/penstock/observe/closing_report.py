"""The closing report of a run: answers before and after training, key figures, and the commands to type next."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.config import Config
from penstock.observe import jsonl
from penstock.observe.notices import failures, notice
from penstock.observe.summary import best_step, held_out_rewards
from penstock.observe.tables import clock, count, facts, listing, number, percent
from penstock.observe.visible_text import visible

LONGEST_CELL = 160
"""Characters of a prompt or an answer; longer ones are cut in their middle."""
SHORTEST_PREFIX = 16
"""Characters. A beginning that all prompts share is shown once if it has at least this length."""
NOTICES = 8
"""Number of notices shown, the latest ones."""


def show(run_dir: Path, console: Console, *, config: Config, commands: Sequence[Mapping[str, str]]) -> None:
    """Print the report of a run that has a summary. `commands` are those of `penstock status`."""
    summary = json.loads((run_dir / "summary.json").read_text())
    events = jsonl.read(run_dir / "events.jsonl")
    evaluations = {e["when"]: e for e in events if e.get("event") == "evaluation" and e.get("samples")}
    checkpoints = [e["path"] for e in events if e.get("event") == "checkpoint"]
    if {"before", "after"} <= evaluations.keys():
        console.print(sample_table(evaluations["before"]["samples"], evaluations["after"]["samples"]), "")
    latest: dict[str, Any] = next((e for e in reversed(events) if e.get("event") == "evaluation"), {})
    if len(latest.get("tags", {})) > 1 or len(latest.get("pass_at", {})) > 1:
        console.print(evaluation_table(latest), "")
    console.print(key_figures(summary, run_dir, checkpoints, best_checkpoint(events, run_dir), config))
    notices = [text for event in events if (text := notice(event)) is not None]
    if len(notices) > NOTICES:
        console.print(Text(f"{len(notices)} notices in events.jsonl, the latest of them:", "yellow"))
    for text in notices[-NOTICES:]:
        console.print(Text(f"! {text}", "yellow"))
    if commands:
        console.print("", Text("next", "bold"), command_lines(commands), sep="\n", soft_wrap=True)


def sample_table(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Group:
    """Return the same held-out tasks side by side, with the answers and rewards before and after training."""
    prefix = common_beginning([_one_line(sample["prompt"]) for sample in before])
    title = Text.assemble(("held-out tasks", "bold"), f": {prefix}…" if prefix else "")
    table = listing()
    is_known = any(sample["expected"] for sample in before)
    for column in ("task", *["expected"] * is_known, "before training", "reward", "after training", "reward"):
        is_reward = column == "reward"
        table.add_column(column, overflow="fold", justify="right" if is_reward else "left", no_wrap=is_reward)
    for first, last in zip(before, after, strict=False):
        expected = [Text(_one_line(first["expected"]))] * is_known
        prompt = Text(_one_line(first["prompt"])[len(prefix) :])
        table.add_row(prompt, *expected, *_answer(first), *_answer(last))
    return Group(title, table)


def common_beginning(texts: Sequence[str]) -> str:
    """Return the whole words that all `texts` begin with. The result is empty for a single text or a short
    beginning."""
    if len(texts) < 2:
        return ""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    prefix = "".join(letters[0] for letters in alike)
    prefix = prefix[: prefix.rfind(" ") + 1]
    return prefix if len(prefix) >= SHORTEST_PREFIX else ""


def command_lines(commands: Sequence[Mapping[str, str]]) -> Text:
    """Return the commands, each under a comment with its purpose, ready to copy."""
    lines = [Text.assemble((f"# {each['purpose']}\n", "dim"), each["command"]) for each in commands]
    return Text("\n").join(lines)


def evaluation_table(evaluation: dict[str, Any]) -> Table:
    """Return the results on the held-out tasks, by tag."""
    ks = list(evaluation["pass_at"])
    numbers = ("tasks", "reward", *(f"pass@{k}" for k in ks), "tokens", "turns", "truncated", "failed")
    table = listing(["tag"], numbers)
    table.title = "held-out tasks" if evaluation["when"] == "given" else f"held-out tasks, {evaluation['when']}"
    table.title_justify, table.title_style = "left", "bold"
    tags = evaluation["tags"]
    for tag, found in [*tags.items(), *([("all", evaluation)] if len(tags) > 1 else [])]:
        rewards = [number(value) for value in (found["reward"], *(found["pass_at"].get(k) for k in ks))]
        lengths = [count(found["response_tokens"]), number(found["turns"])]
        table.add_row(Text(tag), str(found["tasks"]), *rewards, *lengths, str(found["truncated"]), str(found["failed"]))
    return table


def best_checkpoint(events: Sequence[dict[str, Any]], run_dir: Path) -> list[str]:
    """Return the checkpoint with the highest held-out reward, as a line; nothing if there is none but the newest."""
    paths = {event["step"]: event["path"] for event in events if event.get("event") == "checkpoint"}
    rewards = {step: reward for step, reward in held_out_rewards(events).items() if step in paths}
    best = best_step(rewards, run_dir / "checkpoints")
    if best is None or best == max(paths):
        return []
    return [f"{paths[best]}  the highest held-out reward, {number(rewards[best])}"]


def key_figures(
    summary: dict[str, Any], run_dir: Path, checkpoints: Sequence[str], best: Sequence[str], config: Config
) -> Table:
    """Return the most important lines of the summary. `best`: see `best_checkpoint`."""
    wall_s, trajectories = summary["wall_seconds"], count(summary["trajectories"])
    after = f" after {clock(wall_s)}" if wall_s else ""
    rows: list[tuple[str, RenderableType]] = [("status", summary["status"] + after)]
    if summary["eval_before"] is not None:
        change = f"{number(summary['eval_before'])} → {number(summary['eval_after'])}"
        played = f"mean of {config.validation_tasks} tasks, {answers_of(config)}"
        rows.append(("held out", Text.assemble(change, (f"  {played}", "dim"))))
    if "tasks" in summary:
        failed = f", {summary['groups_failed']} failed" if summary["groups_failed"] else ""
        generated = ("tokens", f"{count(summary['tokens_generated'])} generated")
        rows += [
            ("tasks", f"{summary['tasks_played']} of {summary['tasks']} tasks played{failed}"),
            ("played", f"{trajectories} trajectories, mean reward {number(summary['reward_mean'])}"),
            generated if config.policy.has_tokens else ("policy", config.model_name),
            ("dump", str(summary["dump"] or "-")),
        ]
    if summary["steps"]:
        change = f"{number(summary['reward_first'])} → {number(summary['reward_last'])}"
        played = f"all completed, first and last tenth, at temperature {config.env.temperature:g}"
        tokens = f"{count(summary['tokens_generated'])} generated, {count(summary['tokens_trained'])} trained"
        trainer, generator = percent(summary["trainer_busy_fraction"]), percent(summary["generator_busy_fraction"])
        rows += [
            ("reward", Text.assemble(change, (f"  {played}", "dim"))),
            ("steps", f"{summary['steps']}, {trajectories} trajectories"),
            ("tokens", tokens),
            ("busy", f"trainer {trainer}, generator {generator}"),
        ]
    rows += troubles(summary)
    plots = [str(path.relative_to(run_dir)) for path in sorted((run_dir / "plots").glob("*.png"))]
    rows.append(("files", str(from_here(run_dir))))
    return facts([*rows, *(("", name) for name in [*checkpoints[-1:], *best, *plots])])


def troubles(status: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows about surplus trajectories, failed groups and a missing sandbox, for a summary or a status."""
    rows = []
    if status["sandbox"] == "none":
        rows.append(("sandbox", "none: programs of the policy run unconfined, as the user of the run"))
    if surplus := status["ledger"].get("discarded_surplus"):
        rows.append(("surplus", f"{count(surplus)} trajectories more than their groups needed (env.redundancy)"))
    if status["groups_failed"]:
        rows.append(("failures", failures(status["groups_failed"], status["latest_failure"])))
    return rows


def answers_of(config: Config) -> str:
    """Return a phrase for the sampling of validation answers."""
    temperature, *others = {settings.eval_temperature for settings in config.environments.eval.values()}
    if others:
        return "each environment with its own eval_temperature"
    return f"sampled at temperature {temperature:g}" if temperature else "greedy answers"


def from_here(path: Path) -> Path:
    """Return the path relative to the working directory, if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _answer(sample: dict[str, Any]) -> tuple[Text, Text]:
    """Return the cells of an answer and of its reward."""
    reward = float(sample.get("reward") or 0.0)
    style = "green" if reward >= 0.99 else "yellow" if reward > 0 else "red"
    return Text(_one_line(sample.get("answer"))), Text(f"{reward:.2f}", style)


def _one_line(value: object) -> str:
    text = visible(" ".join(str("" if value is None else value).split())) or "∅"
    half = LONGEST_CELL // 2
    return text if len(text) <= LONGEST_CELL else f"{text[:half]} … {text[-half:]}"
