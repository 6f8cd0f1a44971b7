"""Live progress in the terminal, read only from the run's own files: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.observe.jsonl import Follower, read_json
from penstock.observe.notices import failures
from penstock.observe.summary import PLAYED, mean
from penstock.observe.tables import clock, count, facts, number, open_console, percent
from penstock.observe.view import Plan, Record, RunView

PANEL_EVERY_S = 0.25
LINE_EVERY_S = 2.0
QUIET_LINE_EVERY_S = 5.0
"""Seconds between two lines while no step is taken."""
MAX_REASONS = 2
"""Number of filter reasons that a line names."""
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧"
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 40
PANEL_WIDTH = 88
NOTICES, EVALUATIONS = 4, 4
"""Numbers of latest notices and evaluations shown; the first evaluation is shown too."""
MARKS = {"ready": ("●", "green"), "starting": ("○", "yellow"), "pending": ("○", "dim"), "exited": ("✕", "red")}
"""State of a process -> its mark and the colour of the mark."""


class RunFollower:
    """Follows the files of a run and keeps a view of it."""

    def __init__(self, run_dir: Path, plan: Plan) -> None:
        self.run_dir = run_dir
        self.view = RunView(plan=plan)
        self._events = Follower(run_dir / "events.jsonl")
        self._metrics = Follower(run_dir / "metrics.jsonl")

    def update(self) -> RunView:
        """Read the records written since the last call, and return the view."""
        for event in self._events.read_new():
            self.view.see_event(event)
        for line in self._metrics.read_new():
            self.view.see_step(line)
        self.view.played = read_json(self.run_dir / PLAYED)
        return self.view


async def follow(run_dir: Path, plan: Plan, console: Console | None = None) -> None:
    """Show the progress of a run until cancelled. If the terminal or the reader of a pipe goes away, only the display
    ends, not the run. Rich would otherwise end the whole process."""
    console = console or open_console()
    followed = RunFollower(run_dir, plan)
    try:
        await (show_panel(followed, console) if console.is_terminal else show_lines(followed, console))
    except (OSError, SystemExit):
        return


async def show_panel(followed: RunFollower, console: Console) -> None:
    """Redraw a panel in place; the last state stays visible."""

    def draw() -> None:
        live.update(render_panel(followed.update(), followed.run_dir, now=time.time()), refresh=True)

    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                draw()
                await asyncio.sleep(PANEL_EVERY_S)
        finally:
            draw()


async def show_lines(followed: RunFollower, console: Console) -> None:
    """Print one line per phase, notice and validation, and one every few seconds while the run advances."""
    console.out(f"run {followed.run_dir.name} in {followed.run_dir}")
    shown, last_line_at, num_notices, quiet = ("", 0), 0.0, 0, ""
    servers: set[tuple[str, str]] = set()
    evaluations = set(followed.update().evaluations.items())
    while True:
        view = followed.update()
        for name, url in sorted(view.servers.items() - servers):
            console.out(f"{name} serves at {url}")
        for notice in view.notices[num_notices:]:
            console.out(f"! {notice}")
        for when, reward in view.evaluations.items() - evaluations:
            console.out(f"held out, {when}: reward {number(reward)}")
        servers, num_notices = set(view.servers.items()), len(view.notices)
        evaluations |= view.evaluations.items()
        elapsed_s, quiet_line = time.monotonic() - last_line_at, render_quiet_line(view)
        is_news = view.phase != shown[0] or (elapsed_s >= LINE_EVERY_S and view.step != shown[1])
        if is_news or (elapsed_s >= QUIET_LINE_EVERY_S and quiet_line != quiet):
            console.out(render_line(view) if is_news else quiet_line)
            shown, last_line_at, quiet = (view.phase, view.step), time.monotonic(), quiet_line
        await asyncio.sleep(PANEL_EVERY_S)


def render_line(view: RunView) -> str:
    """Return the run as one line of plain text."""
    if not view.advances:
        return render_quiet_line(view)
    progress = view.progress
    parts = [f"{view.unit} {view.step}/{view.plan.num_steps}", f"reward {number(progress['reward'])}"]
    parts += [f"{name} {value}" for name, value in figures(progress).items()]
    return "  ".join([*parts, f"ETA {clock(progress['eta_seconds'])}", *validating(view), *failed(view)])


def figures(progress: Record) -> dict[str, str]:
    """Return the figures of a run that advances, apart from its rewards, as text by name."""
    generated, trained = count(progress["tokens_generated_per_second"]), count(progress["tokens_trained_per_second"])
    if progress["unit"] == "task":
        return {"trajectories/s": count(progress["episodes_per_second"]), "tokens/s": generated}
    trainer, generator = percent(progress["trainer_busy_fraction"]), percent(progress["generator_busy_fraction"])
    return {
        "version": str(progress["policy_version"]),
        "staleness": number(progress["staleness_mean"]),
        "busy": f"trainer {trainer} generator {generator}",
        "tokens/s": f"generated {generated} trained {trained}",
    }


def render_quiet_line(view: RunView) -> str:
    """Return one line for a time in which no step is taken."""
    return "  ".join([view.phase, *completed(view)])


def completed(view: RunView) -> Iterator[str]:
    """Yield the results of a running run so far."""
    if view.status != "running":
        return
    yield from validating(view)
    num_played, dropped = view.played.get("episodes_total", 0), view.played.get("groups_dropped", {})
    parts = [f"{num_played} played"] if num_played else []
    if dropped:
        commonest = sorted(dropped, key=dropped.__getitem__, reverse=True)[:MAX_REASONS]
        parts.append(f"{sum(dropped.values())} groups filtered ({', '.join(commonest)})")
    if parts:
        yield ", ".join(parts)
    yield from failed(view)


def validating(view: RunView) -> list[str]:
    """Return the progress of a validation; empty if none is running."""
    found = view.played.get("held_out")
    return [f"{found['ended']} of {found['tasks']} held-out tasks played"] if found else []


def failed(view: RunView) -> list[str]:
    """Return a note on failed groups; empty if there are none."""
    groups = view.played.get("groups_failed", 0)
    return [failures(groups, view.played.get("latest_failure"))] if groups else []


def render_panel(view: RunView, run_dir: Path, *, now: float) -> RenderableType:
    """Return the run as a panel."""
    parts: list[RenderableType] = [_headline(view, now)]
    parts.append(_figures(view) if view.recent else _processes(view))
    parts += map(Text, completed(view))
    parts += [Text(f"! {notice}", "yellow") for notice in view.notices[-NOTICES:]]
    title = Text.assemble(("penstock ", "bold cyan"), (run_dir.name, "dim"))
    return Panel(Group(*parts), title=title, title_align="left", border_style="cyan", width=PANEL_WIDTH, padding=(0, 1))


def _headline(view: RunView, now: float) -> RenderableType:
    if not view.advances:
        is_over = view.status in ("completed", "stopped", "failed")
        elapsed = f"  {now - view.phase_since:.0f} s" if view.phase_since and not is_over else ""
        spinner = "" if is_over else SPINNER[int(now / PANEL_EVERY_S) % len(SPINNER)] + " "
        hint = "  (Ctrl-C again kills everything)" if view.status == "stopping" else ""
        return Text.assemble((spinner, "cyan"), (view.phase, "bold"), (elapsed, "dim"), (hint, "dim"))
    row = Table.grid(padding=(0, 2))
    row.add_row(
        Text(f"{view.unit} {view.step}/{view.plan.num_steps}", style="bold"),
        ProgressBar(total=max(1, view.plan.num_steps), completed=view.step, width=SPARKLINE_WIDTH),
        Text(f"ETA {clock(view.progress['eta_seconds'])}", style="dim"),
    )
    return row


def _processes(view: RunView) -> RenderableType:
    line = Text()
    for name, state in view.processes.items():
        mark, style = MARKS.get(state, ("◌", "dim"))
        line.append(f"{mark} ", style).append(f"{name}   ", "dim" if state != "ready" else "")
    return line


def _figures(view: RunView) -> RenderableType:
    progress = view.progress
    course = sparkline(list(view.rewards.values()), SPARKLINE_WIDTH)
    reward = Text.assemble((number(progress["reward"]), "bold green"), "  ", (course, "green"))
    rows: dict[str, RenderableType] = {"reward": reward}
    if view.evaluations:
        rows["held out"] = held_out(view.evaluations)
    if len(view.tags) > 1:
        rows["by tag"] = "   ".join(f"{tag} {number(found['reward'])}" for tag, found in view.tags.items())
    rows |= figures(progress)
    if view.unit == "step":
        bound = f" (at most {view.plan.max_staleness})" if view.plan.max_staleness is not None else ""
        rows["staleness"] = f"{rows['staleness']}{bound}   entropy {number(progress['entropy'])}"
    return facts([*rows.items(), ("servers", Text(", ".join(view.servers.values()), "dim"))])


def held_out(evaluations: Mapping[str, float]) -> str:
    """Return the first evaluation and the latest ones."""
    shown = list(evaluations.items())
    shown = shown if len(shown) <= EVALUATIONS else [shown[0], *shown[1 - EVALUATIONS :]]
    return "   ".join(f"{when} {number(reward)}" for when, reward in shown)


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the course of `values` in at most `width` characters; each character is the mean of its share."""
    num = min(width, len(values))
    edges = [index * len(values) // max(1, num) for index in range(num + 1)]
    shares = [mean(values[start:end]) or 0.0 for start, end in itertools.pairwise(edges)]
    low, high = min(shares, default=0.0), max(shares, default=0.0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((share - low) * scale)] for share in shares)
