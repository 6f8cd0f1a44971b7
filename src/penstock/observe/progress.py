"""Live progress in the terminal, from nothing but the run's own files: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.observe.jsonl import Follower, read_json
from penstock.observe.notices import failures
from penstock.observe.summary import PLAYED
from penstock.observe.view import Plan, RunView, mean

PANEL_EVERY_S = 0.25
LINE_EVERY_S = 2.0
QUIET_LINE_EVERY_S = 5.0
"""While no step is taken."""
MAX_REASONS = 2
"""For which groups were filtered, that a line names."""
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧"
SPARKS = "▁▂▃▄▅▆▇█"
SPARKLINE_WIDTH = 40
PANEL_WIDTH = 88
NOTICES, EVALUATIONS = 4, 4
"""The latest are shown; of evaluations also the first."""


class Watched:
    """A run's view, kept up to date from its directory."""

    def __init__(self, run_dir: Path, plan: Plan) -> None:
        self.run_dir = run_dir
        self.view = RunView(plan=plan)
        self._events = Follower(run_dir / "events.jsonl")
        self._metrics = Follower(run_dir / "metrics.jsonl")

    def update(self) -> RunView:
        """Take in what was written since the last call."""
        for event in self._events.read_new():
            self.view.see_event(event)
        for line in self._metrics.read_new():
            self.view.see_step(line)
        self.view.played = read_json(self.run_dir / PLAYED)
        return self.view


async def follow(run_dir: Path, plan: Plan, console: Console | None = None) -> None:
    """Show the progress of a run until cancelled. A terminal that goes away, or whoever read from a pipe, ends the
    display, not the run: rich would have the whole process exit."""
    console = console or Console(highlight=False)
    watched = Watched(run_dir, plan)
    try:
        await (show_panel(watched, console) if console.is_terminal else show_lines(watched, console))
    except (OSError, SystemExit):
        return


async def show_panel(watched: Watched, console: Console) -> None:
    """Redraw in place; the last picture stays."""
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(render_panel(watched.update(), watched.run_dir, now=time.time()), refresh=True)
                await asyncio.sleep(PANEL_EVERY_S)
        finally:
            live.update(render_panel(watched.update(), watched.run_dir, now=time.time()), refresh=True)


async def show_lines(watched: Watched, console: Console) -> None:
    """A line per phase, per notice and per validation, and one every few seconds that something was played."""
    console.out(f"run {watched.run_dir.name} in {watched.run_dir}")
    shown, last_line_at, num_told, quiet = ("", 0), 0.0, 0, ""
    servers: set[tuple[str, str]] = set()
    evaluations = set(watched.update().evaluations.items())
    while True:
        view = watched.update()
        for name, url in sorted(view.servers.items() - servers):
            console.out(f"{name} serves at {url}")
        servers |= view.servers.items()
        for told in view.notices[num_told:]:
            console.out(f"! {told}")
        num_told = len(view.notices)
        for when, reward in view.evaluations.items() - evaluations:
            console.out(f"held out, {when}: reward {number(reward)}")
        evaluations |= view.evaluations.items()
        now = time.monotonic()
        is_due = now - last_line_at >= LINE_EVERY_S and view.step != shown[1]
        is_news = view.phase != shown[0] or is_due
        if is_news or (now - last_line_at >= QUIET_LINE_EVERY_S and render_quiet_line(view) != quiet):
            console.out(render_line(view) if is_news else render_quiet_line(view))
            shown, last_line_at, quiet = (view.phase, view.step), now, render_quiet_line(view)
        await asyncio.sleep(PANEL_EVERY_S)


def render_line(view: RunView) -> str:
    """The run in one line of plain text."""
    if not view.advances:
        return render_quiet_line(view)
    progress = f"{view.unit} {view.step}/{view.plan.num_steps}"
    if view.plan.pipeline == "rollout":
        played, generated = count(view.rate("episodes_total")), count(view.rate("tokens_generated_total"))
        rates = f"{played} trajectories/s  {generated} tokens/s"
        parts = [progress, f"reward {number(view.reward)}", rates, f"ETA {clock(view.eta_s)}"]
        return "  ".join([*parts, *failed(view)])
    parts = [
        progress,
        f"reward {number(view.reward)}",
        f"version {view.latest['policy_version']}",
        f"staleness {number(view.latest.get('staleness_mean'))}",
        f"busy trainer {percent(view.trainer_busy)} generator {percent(view.generator_busy)}",
        f"tokens/s generated {count(view.rate('tokens_generated_total'))} "
        f"trained {count(view.rate('tokens_trained_total'))}",
        f"ETA {clock(view.eta_s)}",
        *validating(view),
        *failed(view),
    ]
    return "  ".join(parts)


def render_quiet_line(view: RunView) -> str:
    """What goes on while no step is taken."""
    return "  ".join([view.phase, *playing(view)])


def playing(view: RunView) -> list[str]:
    """What was played so far, in a run that goes on."""
    if view.status != "running":
        return []
    num_played, dropped = view.played.get("episodes_total", 0), view.played.get("groups_dropped", {})
    parts = [f"{num_played} played"] if num_played else []
    if dropped:
        commonest = sorted(dropped, key=dropped.__getitem__, reverse=True)[:MAX_REASONS]
        parts.append(f"{sum(dropped.values())} groups filtered ({', '.join(commonest)})")
    return [*validating(view), *([", ".join(parts)] if parts else []), *failed(view)]


def validating(view: RunView) -> list[str]:
    """How far a validation is, if there is one."""
    found = view.played.get("held_out")
    return [f"{found['ended']} of {found['tasks']} held-out tasks played"] if found else []


def failed(view: RunView) -> list[str]:
    """Of groups that were given up, if there are any."""
    groups = view.played.get("groups_failed", 0)
    return [failures(groups, view.played.get("latest_failure"))] if groups else []


def render_panel(view: RunView, run_dir: Path, *, now: float) -> RenderableType:
    """The run as a panel."""
    parts: list[RenderableType] = [_headline(view, now)]
    parts.append(_figures(view) if view.recent else _processes(view))
    parts += [Text(told) for told in playing(view)]
    parts += [Text(f"! {told}", "yellow") for told in view.notices[-NOTICES:]]
    title = Text.assemble(("penstock ", "bold cyan"), (run_dir.name, "dim"))
    return Panel(Group(*parts), title=title, title_align="left", border_style="cyan", width=PANEL_WIDTH, padding=(0, 1))


def _headline(view: RunView, now: float) -> RenderableType:
    if not view.advances:
        is_over = view.status in ("completed", "stopped", "failed")
        elapsed = f"  {now - view.phase_since:.0f} s" if view.phase_since and not is_over else ""
        turning = "" if is_over else SPINNER[int(now / PANEL_EVERY_S) % len(SPINNER)] + " "
        hint = "  (Ctrl-C again kills everything)" if view.status == "stopping" else ""
        return Text.assemble((turning, "cyan"), (view.phase, "bold"), (elapsed, "dim"), (hint, "dim"))
    row = Table.grid(padding=(0, 2))
    row.add_row(
        Text(f"{view.unit} {view.step}/{view.plan.num_steps}", style="bold"),
        ProgressBar(total=max(1, view.plan.num_steps), completed=view.step, width=SPARKLINE_WIDTH),
        Text(f"ETA {clock(view.eta_s)}", style="dim"),
    )
    return row


def _processes(view: RunView) -> RenderableType:
    marks = {"ready": ("●", "green"), "starting": ("○", "yellow"), "pending": ("○", "dim"), "exited": ("✕", "red")}
    line = Text()
    for name, state in view.processes.items():
        mark, style = marks.get(state, ("◌", "dim"))
        line.append(f"{mark} ", style).append(f"{name}   ", "dim" if state != "ready" else "")
    return line


def _figures(view: RunView) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=10)
    table.add_column(no_wrap=True)
    reward = Text.assemble(
        (number(view.reward), "bold green"), "  ", (sparkline(list(view.rewards.values()), SPARKLINE_WIDTH), "green")
    )
    table.add_row("reward", reward)
    if view.evaluations:
        table.add_row("held out", held_out(view.evaluations))
    if len(view.tags) > 1:
        table.add_row("by tag", "   ".join(f"{tag} {number(found['reward'])}" for tag, found in view.tags.items()))
    if view.plan.pipeline == "rollout":
        table.add_row("rate", f"{count(view.rate('episodes_total'))} trajectories/s")
        table.add_row("tokens/s", f"{count(view.rate('tokens_generated_total'))} generated")
        table.add_row("servers", Text(", ".join(view.servers.values()), "dim"))
        return table
    bound = f" (at most {view.plan.max_staleness})" if view.plan.max_staleness is not None else ""
    latest = view.latest
    table.add_row(
        "version",
        f"{latest['policy_version']}   staleness {number(latest.get('staleness_mean'))}{bound}"
        f"   entropy {number(latest.get('entropy'))}",
    )
    table.add_row("busy", f"trainer {percent(view.trainer_busy)}   generator {percent(view.generator_busy)}")
    table.add_row(
        "tokens/s",
        f"{count(view.rate('tokens_generated_total'))} generated   {count(view.rate('tokens_trained_total'))} trained",
    )
    table.add_row("servers", Text(", ".join(view.servers.values()), "dim"))
    return table


def held_out(evaluations: Mapping[str, float]) -> str:
    """The first and the latest."""
    shown = list(evaluations.items())
    shown = shown if len(shown) <= EVALUATIONS else [shown[0], *shown[1 - EVALUATIONS :]]
    return "   ".join(f"{when} {number(reward)}" for when, reward in shown)


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` characters, each the mean of its share."""
    if not values:
        return ""
    num = min(width, len(values))
    edges = [index * len(values) // num for index in range(num + 1)]
    shares = [mean(values[start:end]) or 0.0 for start, end in itertools.pairwise(edges)]
    low, high = min(shares), max(shares)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((share - low) * scale)] for share in shares)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def count(value: float | None) -> str:
    """`950`, `18.2k`, `1.3M`."""
    if value is None:
        return "-"
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def clock(seconds: float | None) -> str:
    """`1:05`, `2:03:09`."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
