"""`penstock envs`: what can be written as `env.name`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from penstock.cli.console import open_console
from penstock.cli.refusal import refuse
from penstock.envs.discovery import EnvironmentClass, Unreadable, discover, read_file
from penstock.envs.registry import available


def show(place: Path | None) -> int:
    """The built-in ones, and those in a file, or in files below a directory. Returns the exit code."""
    if place is not None and not place.exists():
        return refuse(f"there is no {place}", 1)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for name, description in available().items():
        table.add_row(name, description)
    num_found = 0
    for found in in_place(place) if place is not None else ():
        if isinstance(found, EnvironmentClass):
            num_found += 1
            table.add_row(found.name, found.description)
        else:
            print(f"skipped {found.file}: {found.reason}", file=sys.stderr)
    open_console().print(table)
    if place is not None and not num_found:
        print(f"\nno environments in {place}: classes with reset and step, or with play, would be listed")
    if place is None:
        print(
            "\nenv.name takes one of these, file.py:Class, package.module:Class, gym:ID (Gymnasium) or gem:ID (GEM); "
            "`penstock envs PATH` finds classes"
        )
    return 0


def in_place(place: Path) -> Iterable[EnvironmentClass | Unreadable]:
    """What a file holds, or the files below a directory."""
    return discover(place) if place.is_dir() else read_file(place)
