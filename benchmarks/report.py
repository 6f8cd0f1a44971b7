"""What every benchmark shares: what it declares, its command line, and the JSON it writes, with commit and machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

PACKAGES = ("penstock", "torch", "transformers", "numpy")
SOURCE = Path(__file__).parent.parent / "src" / "penstock"
SPREAD = "_spread"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What a benchmark declares: the code it measures, and its figures, which both its forms write."""

    name: str
    measures: Sequence[str]
    """Files and folders of `src/penstock`: when they change, published figures are old."""
    figures: Sequence[str]
    """Names, without those of spreads."""
    on_accelerator: Sequence[str] = ()
    """Names with `--device`, where they differ."""

    def check(self, names: Collection[str], *, accelerator: bool, partial: bool) -> None:
        """Exit if `names` are not the declared ones, or code that is measured is not there; `partial`: figures may be
        missing."""
        declared = set((self.on_accelerator if accelerator else ()) or self.figures)
        given = {name for name in names if not name.endswith(SPREAD)}
        missing = set[str]() if partial else declared - given
        if moved := [path for path in self.measures if not (SOURCE / path).exists()]:
            sys.exit(f"{self.name}: it measures {', '.join(moved)}, which src/penstock does not have: say what does it")
        if given - declared or missing:
            sys.exit(f"{self.name}: figures not declared: {sorted(given - declared)}; missing: {sorted(missing)}")


def arguments(description: str, **further: str) -> argparse.Namespace:
    """`--json FILE` and `--quick`, the same for all benchmarks; `further` options by name, with what they want."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="smaller workloads and fewer repetitions")
    for name, wanted in further.items():
        parser.add_argument(f"--{name}", metavar=wanted)
    return parser.parse_args()


def runs_dir(directory: Path, *, quick: bool) -> Path:
    """Return where runs are kept: those of the quick form apart, as the full form must not take them for its own."""
    return directory.resolve() / "quick" if quick else directory.resolve()


@dataclass(slots=True)
class Figures:
    """Figures by name, and those that are best read side by side also as tables."""

    flat: dict[str, float] = field(default_factory=dict)
    tables: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)
    """By title, row and column: the mean, and the largest minus the smallest if there is more than one value."""

    def add(self, key: str, values: Iterable[float | None]) -> list[float]:
        """Add the mean of what was measured (nan if nothing was), and as `<key>_spread` the largest minus the smallest.
        Returns both, as far as they are known."""
        found = [value for value in values if value is not None and not math.isnan(value)]
        self.flat[key] = fmean(found) if found else math.nan
        if len(found) > 1:
            self.flat[key + SPREAD] = max(found) - min(found)
        return [self.flat[name] for name in (key, key + SPREAD)[: min(len(found), 2)]]

    def cell(self, table: str, row: str, column: str, values: Iterable[float | None]) -> None:
        """The same, as `<row>_<column>` and in a table."""
        if summary := self.add(f"{row}_{column}".replace(" ", "_"), values):
            self.tables.setdefault(table, {}).setdefault(row, {})[column] = summary


def publish(
    benchmark: Benchmark,
    figures: Mapping[str, float],
    file: Path | None,
    *,
    tables: Mapping[str, Any] | None = None,
    seeds: Sequence[int] = (),
    runs_of: Collection[str] = (),
    accelerator: str | None = None,
    partial: bool = False,
) -> None:
    """Print the figures and write them to `file`, nan as null. `runs_of` are the commits that made the runs they were
    taken from, `accelerator` names what they were computed on, if it is not the CPU; `partial`: not all of them."""
    for key, value in figures.items():
        print(f"{key:45} {value:12.4g}")
    if file is not None:
        report = {
            "name": benchmark.name,
            "commit": commit(),
            "versions": {
                "python": platform.python_version(),
                **{package: metadata.version(package) for package in PACKAGES},
            },
            "machine": _machine() | ({"accelerator": accelerator} if accelerator else {}),
            "seeds": list(seeds),
            "runs_of": sorted(runs_of),
            "figures": {key: None if math.isnan(value) else value for key, value in figures.items()},
            "tables": tables or {},
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(report, indent=2) + "\n")
    benchmark.check(figures, accelerator=accelerator is not None, partial=partial)


def environment(**further: str) -> dict[str, str]:
    """Return the environment of a run: this one, the modules of the benchmarks, and `further` variables."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **further}


def commit() -> str:
    """The checked-out commit, marked if the tree differs from it; `unknown` outside a checkout."""
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or "unknown"


def source_tree() -> str:
    """Return git's id of the committed `src`, and the changes since that commit."""
    return f"{_git('rev-parse', 'HEAD:src')} {_git('diff', 'HEAD', '--', str(SOURCE))}"


def _git(*words: str) -> str:
    """Return what git prints; nothing if git fails or is not there."""
    root = Path(__file__).parent
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _machine() -> dict[str, str | int]:
    return {"system": platform.platform(), "cpu": _cpu(), "cores": os.cpu_count() or 0}


def _cpu() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
