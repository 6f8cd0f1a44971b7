"""The sandbox of a reward worker: the installed packages, and copies of the Python files that the reward may import.

They are copies, because a folder of the host may also hold secrets and the sockets and files of a run.
"""

from __future__ import annotations

import os
import site
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import penstock
from penstock.config import ConfigError
from penstock.config.imports import find, is_file
from penstock.envs.rewards.reward import locate_reward
from penstock.sandbox import Box, Limits, confinement, open_box
from penstock.sandbox.backends import may_mount

LIMITS = Limits(memory_bytes=4 << 30)
"""Limits of a reward worker in a sandbox. `env.reward_timeout_s` limits its time."""
PACKAGES = (*map(Path, site.getsitepackages()), *map(Path, penstock.__path__))
MOST_FILES, MOST_BYTES = 500, 16 << 20


def open_reward_box(reward: str) -> Box | None:
    """Open the sandbox of a reward worker; None with `env.sandbox: none`. Raises `SandboxUnavailable`."""
    if confinement() == "none":
        return None
    return open_box(limits=LIMITS, readable=[path for path in PACKAGES if path.exists()], copied=sources(reward))


def sources(reward: str) -> dict[Path, bytes]:
    """Return the Python files that a reward may import: those beside its file with the packages there, or those of its
    package. Raises `ConfigError` if they are too many."""
    where, _ = locate_reward(reward)
    found = [path for folder in _folders(where) for path in islice(_python_files(folder), MOST_FILES + 1)]
    if len(found) > MOST_FILES or sum(path.stat().st_size for path in found) > MOST_BYTES:
        raise ConfigError(
            f"env.reward {reward!r}: {found[0].parent} holds more than {MOST_FILES} Python files, or more than "
            f"{MOST_BYTES >> 20} MiB of them, and the sandbox of a reward gets copies of them: move the reward to a "
            "folder of its own, or install its package"
        )
    copies = {}
    for path in found:
        with suppress(PermissionError):  # of another user
            copies[path] = path.read_bytes()
    return copies


def check_reward_box(reward: str) -> None:
    """Raise `ConfigError` if a sandbox cannot show a reward what it may import. As root, its user is another one."""
    if confinement() == "none":
        return
    sources(reward)
    for path in PACKAGES if os.geteuid() == 0 else ():
        for each in (path,) if may_mount() else (path, *path.parents):
            if each.exists() and not _is_open(each):
                raise ConfigError(
                    f"env.reward {reward!r}: a sandbox of root runs as another user, which cannot read {each}: chmod "
                    f"o+rX {each}, or run as an ordinary user"
                )


def _is_open(folder: Path) -> bool:
    wanted = stat.S_IROTH | stat.S_IXOTH
    return folder.stat().st_mode & wanted == wanted


def _folders(where: str) -> list[Path]:
    """Return the folder of a reward's file, or of its package. None of those that the sandbox sees anyway."""
    if is_file(where):
        folders = [Path(where).absolute().parent]
    else:
        spec = find(where.partition(".")[0])
        inner = spec.submodule_search_locations if spec is not None else None
        origin = spec.origin if spec is not None and spec.has_location else None
        folders = [*map(Path, inner)] if inner else [Path(origin).absolute().parent] if origin else []
    return [folder for folder in folders if not any(folder.is_relative_to(seen) for seen in PACKAGES)]


def _python_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and _is_plain(path):
            yield path
        elif _is_plain(path / "__init__.py"):
            yield from _python_files(path)


def _is_plain(path: Path) -> bool:
    with suppress(OSError):
        return path.is_file()
    return False
