"""The console that commands print to, and the tables and figures on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from penstock.observe.visible_text import visible

FILE_WIDTH = 160
"""Characters per line if the output is not a terminal; a terminal has its own width."""


class VisibleConsole(Console):
    """A console that prints no character that a terminal would obey or hide: such characters are shown escaped."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable. Their styles and cursor movements are Rich's own, their text is not."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def open_console(*, stderr: bool = False) -> Console:
    """Return a console that prints text as text: no markup, no coloured numbers, no control characters."""
    console = VisibleConsole(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def facts(rows: Iterable[Sequence[RenderableType]]) -> Table:
    """Return a table of (label, value) rows; plain strings are shown unchanged."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def listing(names: Iterable[str] = (), numbers: Iterable[str] = ()) -> Table:
    """Return an empty table with columns of text, then columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, no_wrap=True, justify="right")
    return table


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def count(value: float | None) -> str:
    """Return a number in short form: `950`, `18.2k`, `1.3M`."""
    if value is None:
        return "-"
    for limit, unit in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{unit}"
    return f"{value:.0f}"


def clock(seconds: float | None) -> str:
    """Return a duration as `1:05` or `2:03:09`."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
