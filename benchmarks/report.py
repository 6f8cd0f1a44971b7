"""What every benchmark shares: its command line and the JSON it writes, with commit, versions and machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

PACKAGES = ("penstock", "torch", "transformers", "numpy")


def arguments(description: str, **further: str) -> argparse.Namespace:
    """`--json FILE` and `--quick`, the same for all benchmarks; `further` options by name, with what they want."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="smaller workloads and fewer repetitions")
    for name, wanted in further.items():
        parser.add_argument(f"--{name}", metavar=wanted)
    return parser.parse_args()


@dataclass(slots=True)
class Figures:
    """Figures by name, and those that are best read side by side also as tables."""

    flat: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    """By title, row and column: the mean, and the largest minus the smallest if there is more than one value."""

    def add(self, key: str, values: Iterable[float | None]) -> list[float]:
        """The mean of what there is, and as `<key>_spread` the largest minus the smallest; returns both."""
        found = [value for value in values if value is not None]
        summary = ([fmean(found)] if found else []) + ([max(found) - min(found)] if len(found) > 1 else [])
        self.flat.update(zip((key, f"{key}_spread"), summary, strict=False))
        return summary

    def cell(self, table: str, row: str, column: str, values: Iterable[float | None]) -> None:
        """The same, as `<row>_<column>` and in a table."""
        if summary := self.add(f"{row}_{column}".replace(" ", "_"), values):
            self.tables.setdefault(table, {}).setdefault(row, {})[column] = summary


def publish(
    name: str,
    figures: Mapping[str, float],
    file: Path | None,
    *,
    tables: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (),
    runs_of: Collection[str] = (),
    accelerator: str | None = None,
) -> None:
    """Print the figures and write them to `file`; `runs_of` are the commits that made the runs they were taken from,
    `accelerator` names what they were computed on, if it is not the CPU."""
    for key, value in figures.items():
        print(f"{key:45} {value:12.4g}")
    if file is None:
        return
    report = {
        "name": name,
        "commit": commit(),
        "versions": {
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in PACKAGES},
        },
        "machine": _machine() | ({"accelerator": accelerator} if accelerator else {}),
        "seeds": list(seeds),
        "runs_of": sorted(runs_of),
        "figures": dict(figures),
        "tables": tables or {},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=2) + "\n")


def commit() -> str:
    """The checked-out commit, marked if the tree differs from it; `unknown` outside a checkout."""
    root = Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def _machine() -> dict[str, str | int]:
    return {"system": platform.platform(), "cpu": _cpu(), "cores": os.cpu_count() or 0}


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
