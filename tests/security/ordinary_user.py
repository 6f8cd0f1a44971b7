"""Runs a command as an ordinary user, or as root without a capability. Both can read this checkout and this Python even
if they lie in root's home."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

UID = 65_432
NAMESPACES = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")
ROOT = Path(__file__).parents[2]


def closed_folders() -> list[Path]:
    """Return the outermost folders that other users cannot enter, above the files that a test needs."""
    found = []
    for path in needed():
        for folder in reversed(path.parents):
            if not folder.stat().st_mode & 0o001:
                found.append(folder)
                break
    return list(dict.fromkeys(found))


def needed() -> list[Path]:
    return list(dict.fromkeys(Path(path) for path in (sys.base_prefix, sys.prefix, ROOT)))


def script() -> str:
    """Return shell commands that show closed folders to all users, with nothing in them but the needed files. They hold
    in a mount namespace of their own."""
    stage = [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote('/mnt')}"]
    hidden = [(f"/mnt/{number}", path) for number, path in enumerate(needed())]
    hidden = [(at, path) for at, path in hidden if any(path.is_relative_to(folder) for folder in closed_folders())]
    stage += [f"mkdir {at} && mount --rbind {shlex.quote(str(path))} {at}" for at, path in hidden]
    stage += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(folder))}" for folder in closed_folders()]
    for at, path in hidden:
        stage.append(f"mkdir -p {shlex.quote(str(path))} && mount --rbind {at} {shlex.quote(str(path))}")
    return " && ".join(stage)


def run(words: list[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command as an ordinary user: this one, or another one if this one is root. Nothing of it outlives it."""
    if os.getuid() != 0:
        return subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    drop = ["--reuid", str(UID), "--regid", str(UID), "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    return run_with(drop, words, timeout=timeout)


def run_with(drop: list[str], words: list[str], *, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command with the arguments `drop` of `setpriv`. Nothing of it outlives it."""
    env = {"PATH": os.environ["PATH"], "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [*NAMESPACES, f"{script()} && exec setpriv {shlex.join(drop)} {shlex.join(words)}"],
        capture_output=True, text=True, timeout=timeout, check=False, env=env, cwd="/",
    )  # fmt: skip
