"""`penstock envs`: what can be written as `env.name`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.table import Table

from penstock.cli.console import open_console
from penstock.envs.discovery import EnvironmentClass, discover
from penstock.envs.registry import available


def show(directory: Path | None) -> None:
    """The built-in ones, and those in files below `directory`."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for name, description in available().items():
        table.add_row(name, description)
    for found in discover(directory) if directory is not None else ():
        if isinstance(found, EnvironmentClass):
            table.add_row(found.name, found.description)
        else:
            print(f"skipped {found.file}: {found.reason}", file=sys.stderr)
    open_console().print(table)
    if directory is None:
        print(
            "\nenv.name takes one of these, file.py:Class, package.module:Class, gym:ID (Gymnasium) or gem:ID (GEM); "
            "`penstock envs DIR` finds classes"
        )
