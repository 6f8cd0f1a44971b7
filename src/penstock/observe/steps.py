"""The optimizer steps of the lineage that survived: what a trainer took after its last checkpoint, and lost, is passed
over."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.observe import jsonl

Record = dict[str, Any]


def read(run_dir: Path) -> list[Record]:
    """The lines of metrics.jsonl, one per step, in order."""
    return surviving(jsonl.read(run_dir / "metrics.jsonl"))


def surviving(lines: Iterable[Record]) -> list[Record]:
    """A step that is taken again replaces the one before, and all that followed it."""
    kept: list[Record] = []
    for line in lines:
        while kept and kept[-1].get("step", 0) >= line.get("step", 0):
            kept.pop()
        kept.append(line)
    return kept
