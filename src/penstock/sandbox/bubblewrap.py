"""The backend that confines with bubblewrap (0.8 or newer)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.sandbox import seccomp
from penstock.sandbox.launch import INIT, MASKED, READ_ONLY_BYTES, SIZED, WORK, Launch, Plan, is_loose


def command(plan: Plan, launch: Launch) -> list[str]:
    """Return the command line that starts the init of a box."""
    return ["bwrap", *_namespaces(plan), *_mounts(plan, launch), *_init(plan, launch)]


def _namespaces(plan: Plan) -> Iterator[str]:
    yield from ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "box")
    yield from () if plan.network else ("--unshare-net",)
    yield from ("--die-with-parent", "--as-pid-1", "--new-session", "--clearenv", "--chdir", "/")
    if plan.slot_uid is None:
        yield from ("--unshare-user", "--disable-userns", "--uid", str(plan.uid), "--gid", str(plan.uid))
        yield from ("--cap-drop", "ALL")
    else:  # root makes the namespaces, and the init gives up root
        yield from ("--cap-drop", "ALL")
        yield from (x for name in ("SETUID", "SETGID", "SETPCAP") for x in ("--cap-add", f"CAP_{name}"))


def _mounts(plan: Plan, launch: Launch) -> Iterator[str]:
    yield from ("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev")
    for name in SIZED:  # before the binds, because what the box may read can lie below /tmp
        yield from ("--perms", "1777", "--size", str(plan.limits.work_bytes), "--tmpfs", name)
    for stay in plan.stays:
        yield from ("--perms", "0755", "--size", str(READ_ONLY_BYTES), "--tmpfs", stay)
    for folder in folders((*plan.read_only, *map(Path, plan.texts))):
        yield from ("--perms", "0755", "--dir", str(folder))
    for path in plan.read_only:
        yield from (
            ("--symlink", str(path.readlink()), str(path)) if path.is_symlink() else ("--ro-bind", *2 * [str(path)])
        )
    for name in MASKED:
        yield from ("--ro-bind", "/dev/null", name) if Path(name).exists() else ()
    for name, content in plan.texts.items():
        how = "--ro-bind-data" if is_loose(name) else "--file"  # mounts make a start slow if they are many
        yield from ("--perms", "0444", how, str(launch.text(content)), name)
    for stay in (*plan.stays, "/dev", "/"):
        yield from ("--remount-ro", stay)


def folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders above `paths`, outer ones first."""
    return sorted({folder for path in paths for folder in path.parents} - {Path("/"), *map(Path, SIZED)})


def _init(plan: Plan, launch: Launch) -> Iterator[str]:
    yield from ("--seccomp", str(launch.text(seccomp.program(shares_user=plan.slot_uid is None))), "--")
    yield from (*launch.python(INIT), *launch.arguments(plan, WORK))
