"""Read and signal processes through /proc (standard library only, because the janitor uses this module).

A pid alone does not identify a process, because the kernel reuses pids. An identity is pid + start time + boot id + pid
namespace, and this module sends no signal without it. Without /proc it finds and signals no process.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
BETWEEN_LOOKS_S = 0.01
ROUNDS = 40
"""Most looks for the members of a family that is to be killed."""
PIDS = range(1, 1 << 31)
"""Numbers that a process can have."""
MAX_ENVIRONMENT_BYTES = 8 << 20
"""Largest part of an environment that is read. The kernel starts no program with a larger environment, but a running
process may declare any part of its memory to be its environment."""
END_S = 0.5
"""Limit for a killed process to end, before the next look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process, identified within one boot of one machine and one pid namespace (container)."""

    pid: int
    start_ticks: int
    """Clock ticks between boot and start (field 22 of /proc/<pid>/stat)."""
    boot_id: str
    pid_namespace: str

    @classmethod
    def of(cls, facts: object) -> Identity | None:
        """Return the identity in `facts`, as `dataclasses.asdict` writes it; None if a field is missing or has another
        type. Other facts are ignored."""
        found = facts if isinstance(facts, Mapping) else {}
        pid, start_ticks = found.get("pid"), found.get("start_ticks")
        boot_id, pid_namespace = found.get("boot_id"), found.get("pid_namespace")
        if type(pid) is not int or pid not in PIDS or type(start_ticks) is not int:
            return None
        if not isinstance(boot_id, str) or not isinstance(pid_namespace, str):
            return None
        return cls(pid=pid, start_ticks=start_ticks, boot_id=boot_id, pid_namespace=pid_namespace)

    @property
    def is_here(self) -> bool:
        """Return whether this process could see it: same boot of the same machine, and same container."""
        return (self.boot_id, self.pid_namespace) == (boot_id(), pid_namespace())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """A row of the process table."""

    pid: int
    state: str
    """R, S, D, T, Z, ..."""
    parent: int
    session: int
    start_ticks: int

    @property
    def is_dead(self) -> bool:
        """Return whether the process has ended, and only its exit code is left."""
        return self.state in "ZX"


def _read(path: Path, max_bytes: int = -1) -> bytes:
    """Return the content of the file, or its first `max_bytes`; empty if it does not exist or we may not read it."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError:
        return b""


def read_stat(pid: int) -> Stat | None:
    """Return the row of `pid`; None if there is no such process."""
    text = _read(PROC / f"{pid:d}" / "stat")
    if not text:
        return None
    state, parent, _, session, *others = text.rpartition(b")")[2].split()  # the command before it may contain brackets
    return Stat(pid=pid, state=state.decode(), parent=int(parent), session=int(session), start_ticks=int(others[15]))


def boot_id() -> str:
    """Return an id that changes with every boot; empty if the system has none."""
    return _read(PROC / "sys/kernel/random/boot_id").decode().strip()


def pid_namespace(process: str = "self") -> str:
    """Return an id that differs between containers that do not see each other's processes; empty if the system has
    none, or does not tell us that of `process`."""
    try:
        return str((PROC / process / "ns/pid").readlink())
    except OSError:
        return ""


def identify(pid: int) -> Identity | None:
    """Return the identity of the process that has `pid` now; None if there is no such process."""
    stat = read_stat(pid)
    return None if stat is None else _identity(stat)


def _identity(stat: Stat) -> Identity:
    return Identity(pid=stat.pid, start_ticks=stat.start_ticks, boot_id=boot_id(), pid_namespace=pid_namespace())


def is_alive(identity: Identity) -> bool:
    """Return whether exactly this process still runs. False for a zombie, and for a process that is not here (see
    `Identity.is_here`)."""
    stat = read_stat(identity.pid)
    return stat is not None and not stat.is_dead and stat.start_ticks == identity.start_ticks and identity.is_here


def is_suspended(identity: Identity) -> bool:
    """Return whether exactly this process is alive but suspended, by SIGSTOP or by a tracer."""
    stat = read_stat(identity.pid)
    return stat is not None and stat.state in "Tt" and is_alive(identity)


def open_pidfd(pid: int) -> int | None:
    """Return a file descriptor of the process, which becomes readable when it ends. Returns None if the process is
    gone, or if the system has no pidfds."""
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def send(identity: Identity, signum: int) -> bool:
    """Signal exactly this process, never another process that got its pid. Returns False if it is gone. Without pidfds,
    the signal goes astray if the pid is reused right after the check."""
    pidfd = open_pidfd(identity.pid)
    try:
        if not is_alive(identity):
            return False
        if pidfd is None:
            os.kill(identity.pid, signum)
        else:
            signal.pidfd_send_signal(pidfd, signum)
    except ProcessLookupError:
        return False
    finally:
        if pidfd is not None:
            os.close(pidfd)
    return True


def environment(pid: int) -> list[bytes]:
    """Return the environment entries (`NAME=value`) that `pid` was started with; empty if it is gone or we may not read
    them. Empty too if another user started it, or a program in a sandbox, since these chose what they say."""
    if not _is_ours(pid):
        return []
    entries = _read(PROC / f"{pid:d}" / "environ", MAX_ENVIRONMENT_BYTES).split(b"\0")
    return entries if _is_ours(pid) else []  # the kernel may have reused the pid


def _is_ours(pid: int) -> bool:
    """Return whether a process has our user id in all respects, and lives in our container. A set-user-id program that
    another user started has ours in some."""
    found = re.search(rb"^Uid:(.*)$", _read(PROC / f"{pid:d}" / "status"), re.M)
    has_our_user = found is not None and set(map(int, found[1].split())) == {os.geteuid()}
    return has_our_user and pid_namespace(f"{pid:d}") == pid_namespace()


def num_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, in this control group or else on this
    machine."""
    group = os.fsdecode(_read(PROC / "self/cgroup")).rpartition("::")[2].strip()
    counters = _read(Path(f"/sys/fs/cgroup{group}/memory.events")) or _read(PROC / "vmstat")
    return int(dict(line.split() for line in counters.splitlines()).get(b"oom_kill", 0))


def table() -> Iterator[Stat]:
    """Return all processes."""
    return _rows(entry.name for entry in PROC.glob("[1-9]*"))


def children() -> Iterator[Stat]:
    """Return the children of this process, including adopted orphans."""
    try:
        lists = [(task / "children").read_text() for task in (PROC / "self/task").iterdir()]
    except OSError:
        return (stat for stat in table() if stat.parent == os.getpid())
    return _rows(" ".join(lists).split())


def _rows(pids: Iterable[str]) -> Iterator[Stat]:
    return (stat for pid in pids if (stat := read_stat(int(pid))) is not None)


def family(belongs: Callable[[Stat], bool], *, spare: Collection[int]) -> list[Stat]:
    """Return the living processes for which `belongs` is true, and all their descendants, without those in `spare`."""
    rows = {stat.pid: stat for stat in table() if not stat.is_dead and stat.pid not in spare}
    found: set[int] = set()
    generation = {pid for pid, stat in rows.items() if belongs(stat)}
    while generation:
        found |= generation
        generation = {pid for pid, stat in rows.items() if stat.parent in found} - found
    return [rows[pid] for pid in sorted(found)]


def kill_family(belongs: Callable[[Stat], bool], *, spare: Collection[int] = (), rounds: int = ROUNDS) -> list[Stat]:
    """SIGKILL the family until two looks in a row find no process, in at most `rounds` looks. Spare this process and
    the pids in `spare`. Returns the survivors.

    One look is not enough. A process may fork after the look and before the signal. A process in the middle of `exec`
    has no environment yet, so its marks cannot be read.
    """
    num_empty = 0
    members: list[Stat] = []
    for _ in range(rounds):
        members = family(belongs, spare={os.getpid(), *spare})
        num_empty = 0 if members else num_empty + 1
        if num_empty == 2:
            break
        for stat in members:
            send(_identity(stat), signal.SIGKILL)
        if members:
            _await_end(members)
        else:
            time.sleep(BETWEEN_LOOKS_S)
    return members


def _await_end(members: list[Stat]) -> None:
    """Wait for the ends on pidfds, so that the next look does not find dying processes."""
    for stat in members:
        pidfd = open_pidfd(stat.pid)
        if pidfd is None:
            time.sleep(BETWEEN_LOOKS_S)
            continue
        with os.fdopen(pidfd) as file:
            poll = select.poll()
            poll.register(file, select.POLLIN)
            poll.poll(END_S * 1000)
