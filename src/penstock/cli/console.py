"""Where commands print."""

from __future__ import annotations

from rich.console import Console

FILE_WIDTH = 160
"""Characters of a line where the output is no terminal, which would have a width of its own."""


def open_console(*, stderr: bool = False) -> Console:
    """What is printed is shown as it is: no markup, no numbers in colour."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console
