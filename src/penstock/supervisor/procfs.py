"""Processes as the kernel knows them (standard library only; shared with the janitor).

A pid alone is never an identity, since pids are reused: pid + start time + boot id + pid namespace is one, and no
signal leaves from here without it. Where there is no /proc, nothing is found and nothing is signalled by identity.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

PROC = Path("/proc")
BETWEEN_LOOKS_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process of one boot of one machine, as those in the same pid namespace (container) know it."""

    pid: int
    start_ticks: int
    """Clock ticks between boot and start (field 22 of /proc/<pid>/stat)."""
    boot_id: str
    pid_namespace: str

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Identity | None:
        """Among other facts, as `dataclasses.asdict` writes it; None if it is not all there."""
        known = {field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        return cls(**known) if len(known) == len(fields(cls)) else None

    @property
    def is_here(self) -> bool:
        """Whether its life or death can be seen from here; not on another machine, nor in another container."""
        return (self.boot_id, self.pid_namespace) == (boot_id(), pid_namespace())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """A row of the process table."""

    pid: int
    state: str
    """R, S, D, T, Z, ..."""
    parent: int
    group: int
    session: int
    start_ticks: int


def read_stat(pid: int) -> Stat | None:
    """The row of `pid`; None if there is no such process."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command before it may hold anything, brackets included
    state, parent, group, session = fields[:4]
    return Stat(
        pid=pid,
        state=state,
        parent=int(parent),
        group=int(group),
        session=int(session),
        start_ticks=int(fields[19]),
    )


def boot_id() -> str:
    """Changes with every boot; empty where the system has none."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> str:
    """Differs between containers that do not see each other's processes; empty where the system has none."""
    try:
        return str((PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


def identify(pid: int) -> Identity | None:
    """Who `pid` is right now; None if nobody."""
    stat = read_stat(pid)
    return None if stat is None else _identity(stat)


def _identity(stat: Stat) -> Identity:
    return Identity(pid=stat.pid, start_ticks=stat.start_ticks, boot_id=boot_id(), pid_namespace=pid_namespace())


def is_alive(identity: Identity) -> bool:
    """Whether that very process still runs (a zombie does not); never of one that is not here."""
    stat = read_stat(identity.pid)
    return stat is not None and stat.state not in "ZX" and stat.start_ticks == identity.start_ticks and identity.is_here


def is_suspended(identity: Identity) -> bool:
    """Whether that very process lives and does not run, by SIGSTOP or because somebody traces it."""
    stat = read_stat(identity.pid)
    return stat is not None and stat.state in "Tt" and is_alive(identity)


def send(identity: Identity, signum: int) -> bool:
    """Signal that very process, never another that got its pid. False if it is gone."""
    try:
        fd = os.pidfd_open(identity.pid)
    except (OSError, AttributeError):
        return _send_by_pid(identity, signum)
    try:
        if not is_alive(identity):
            return False
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


def _send_by_pid(identity: Identity, signum: int) -> bool:
    """Where the kernel has no pidfds: between the look and the signal, a pid would have to be reused."""
    if not is_alive(identity):
        return False
    try:
        os.kill(identity.pid, signum)
    except ProcessLookupError:
        return False
    return True


def environment(pid: int) -> list[bytes]:
    """The entries (`NAME=value`) that `pid` was started with; none if it is gone or not ours to read."""
    try:
        return (PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def num_oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory: in this control group, or else on this machine."""
    try:
        group = (PROC / "self/cgroup").read_text().rpartition("::")[2].strip()
        counters = Path(f"/sys/fs/cgroup{group}/memory.events").read_text()
    except OSError:
        try:
            counters = (PROC / "vmstat").read_text()
        except OSError:
            return 0
    return int(dict(line.split() for line in counters.splitlines()).get("oom_kill", 0))


def table() -> Iterator[Stat]:
    """All processes."""
    pids = (int(entry.name) for entry in PROC.glob("[1-9]*"))
    return (stat for pid in pids if (stat := read_stat(pid)) is not None)


def children() -> Iterator[Stat]:
    """The processes this one is the parent of, by birth or by adoption."""
    own_pid = os.getpid()
    try:
        lists = [(task / "children").read_text() for task in (PROC / "self/task").iterdir()]
    except OSError:
        return (stat for stat in table() if stat.parent == own_pid)
    return (stat for pid in " ".join(lists).split() if (stat := read_stat(int(pid))) is not None)


def family(belongs: Callable[[Stat], bool], *, spare: Collection[int]) -> list[Stat]:
    """The living processes that belong, and all their descendants; never those in `spare`."""
    rows = {stat.pid: stat for stat in table() if stat.state not in "ZX" and stat.pid not in spare}
    found = {pid for pid, stat in rows.items() if belongs(stat)}
    grown = True
    while grown:
        children = {pid for pid, stat in rows.items() if stat.parent in found} - found
        found |= children
        grown = bool(children)
    return [rows[pid] for pid in sorted(found)]


def kill_family(belongs: Callable[[Stat], bool], *, spare: Collection[int], rounds: int) -> list[Stat]:
    """SIGKILL the family until two looks in a row find nobody, at most `rounds` times. Returns who resisted.

    One look is not enough: a process may fork between being seen and being killed, and one that is just being
    executed has no environment yet to be known by.
    """
    num_empty = 0
    members: list[Stat] = []
    for _ in range(rounds):
        members = family(belongs, spare=spare)
        num_empty = 0 if members else num_empty + 1
        if num_empty == 2:
            return []
        for stat in members:
            send(_identity(stat), signal.SIGKILL)
        if members:
            _await_end(members)
        else:
            time.sleep(BETWEEN_LOOKS_S)
    return members


def _await_end(members: list[Stat], seconds: float = 0.5) -> None:
    """Wait on pidfds, so that the next look does not find what is already dying."""
    for stat in members:
        try:
            fd = os.pidfd_open(stat.pid)
        except (OSError, AttributeError):
            time.sleep(BETWEEN_LOOKS_S)
            continue
        with os.fdopen(fd) as file:
            poll = select.poll()
            poll.register(file, select.POLLIN)
            poll.poll(seconds * 1000)
