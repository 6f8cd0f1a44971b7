"""`penstock envs`: list the possible values of `env.name`."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.cli.refusal import refuse
from penstock.envs.discovery import EnvironmentClass, discover, read_file
from penstock.envs.registry import available
from penstock.observe.tables import facts, open_console
from penstock.observe.visible_text import visible


def show(place: Path | None) -> int:
    """List the built-in environments, and those in a file or in files below a directory. Return the exit code."""
    if place is not None and not place.exists():
        return refuse(f"there is no {place}", 1)
    rows = available()
    num_built_in = len(rows)
    found = [] if place is None else [*discover(place)] if place.is_dir() else read_file(place)
    for each in found:
        if isinstance(each, EnvironmentClass):
            rows |= {each.name: each.description}
        else:
            print(visible(f"skipped {each.file}: {each.reason}"), file=sys.stderr)
    open_console().print(facts(rows.items()))
    if place is not None and len(rows) == num_built_in:
        print(visible(f"\nno environments in {place}: a class needs the methods reset and step, or play"))
    if place is None:
        print(
            "\nenv.name takes one of these, file.py:Class, package.module:Class, gym:ID (Gymnasium) or gem:ID (GEM); "
            "`penstock envs PATH` finds classes"
        )
    return 0
