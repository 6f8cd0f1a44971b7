"""What every backend does to start a box: what the box shall see, the files handed to it, and the first word of its
init."""

from __future__ import annotations

import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile

from penstock.sandbox.limits import Limits

START_S = 20.0
"""Time limit for a box to start."""
RUN = "import marshal, sys; exec(marshal.load(open(int(sys.argv[1]), 'rb')))"
WORK = "/work"
SIZED = (WORK, "/tmp", "/dev/shm")
"""The only directories of a box that its programs can write to."""
READ_ONLY_BYTES = 64 << 20
"""Size of a file system of a box that holds copied files and folders, and that programs cannot write to."""
MASKED = tuple(
    f"/proc/{name}"
    for name in ("kcore", "keys", "key-users", "kmsg", "timer_list", "sched_debug", "kallsyms", "sysrq-trigger")
)
"""Files of /proc that tell about the whole machine."""
SYSTEM = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")))
OF_ETC = tuple(map(Path, ("/etc/ld.so.cache", "/etc/alternatives")))
"""What the loader and the commands of /usr need. Neither holds a secret."""
FOR_NETWORK = tuple(map(Path, ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl/certs")))
BOX_UID = 1000
"""User inside a box of an ordinary user; outside it is that user."""


def compiled(name: str) -> bytes:
    """Return a module of this folder as code, because a box starts faster so. Boxes have the same interpreter."""
    return marshal.dumps(compile(Path(__file__).with_name(name).read_text(), name, "exec"))


INIT = compiled("init.py")


def is_loose(name: str) -> bool:
    """Return whether a file lies directly in a directory that programs can write to. It needs a mount of its own."""
    return str(Path(name).parent) in SIZED


class LaunchFailed(OSError):
    """A box could not be started. The message is what the launcher said."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a box is to be, for any backend."""

    limits: Limits
    network: bool = False
    readable: tuple[Path, ...] = ()
    """Host paths that are mounted read-only at the same place."""
    copied: Mapping[Path, bytes] = field(default_factory=dict)
    """Files that only the box has, read-only, by their place there."""
    slot_uid: int | None = None
    """The box's own user, if root makes it."""

    def __post_init__(self) -> None:
        for path in self.readable:
            if hidden := [name for name in SIZED if Path(name).is_relative_to(os.path.normpath(path))]:
                raise ValueError(f"readable: {path} cannot be shown in a box, which has {hidden[0]} of its own there")

    @property
    def uid(self) -> int:
        """Return the user as programs in the box see it."""
        return BOX_UID if self.slot_uid is None else self.slot_uid

    @cached_property
    def read_only(self) -> list[Path]:
        """Return the host paths that the box sees read-only; those that are links are links there."""
        prefix = Path(sys.base_prefix)
        interpreter = () if prefix.is_relative_to("/usr") else (prefix,)
        extra = FOR_NETWORK if self.network else ()
        return [path for path in (*SYSTEM, *OF_ETC, *interpreter, *extra, *self.readable) if path.exists()]

    @cached_property
    def stays(self) -> list[str]:
        """Return the folders in directories that programs can write to, through which the box sees something read-only.
        Each gets a mount of its own, because programs could rename a plain folder and put another in its place."""
        read_only = self.read_only
        lexical = [Path(os.path.normpath(path)) for path in read_only]
        folders = [Path(name).parent for name in self.texts]
        firsts = {
            sized / path.relative_to(sized).parts[0]
            for path in (*read_only, *lexical, *folders)
            for sized in map(Path, SIZED)
            if path.is_relative_to(sized) and path != sized
        }
        return sorted(str(first) for first in firsts if not any(first.is_relative_to(path) for path in lexical))

    @cached_property
    def texts(self) -> dict[str, bytes]:
        """Return the content of files that only the box has, and that it does not see anyway."""
        read_only = self.read_only
        copied = {
            str(path): content
            for path, content in self.copied.items()
            if not any(path.is_relative_to(shown) for shown in read_only)
        }
        return copied | {
            "/etc/passwd": f"box:x:{self.uid}:{self.uid}:box:/work:/bin/sh\n".encode(),
            "/etc/group": f"box:x:{self.uid}:\n".encode(),
        }


@dataclass(slots=True)
class Launch:
    """The start of one box: its socket, and the files that its launcher gets."""

    ours: socket.socket = field(init=False)
    theirs: socket.socket = field(init=False)
    fds: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()

    @property
    def control(self) -> int:
        """Return the number of the init's socket."""
        return self.theirs.fileno()

    def text(self, content: bytes) -> int:
        """Return the number of a file with this content that the launcher can read."""
        fd = os.memfd_create("penstock")
        self.fds.append(fd)
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def python(self, code: bytes) -> list[str]:
        """Return a command line that runs compiled code."""
        return [interpreter(), "-I", "-S", "-c", RUN, str(self.text(code))]

    def arguments(self, plan: Plan, work: str) -> list[str]:
        """Return the arguments of the init. `work`: the work directory as the box sees it."""
        uid = "-1" if plan.slot_uid is None else str(plan.slot_uid)
        return [str(self.control), work, uid, "shared" if plan.network else "apart"]

    def start(
        self, command: Sequence[str], *, begun: Callable[[int], None], user: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Start the launcher, call `begun` with its process id, and wait until its init answers. Raises
        `LaunchFailed`."""
        with TemporaryFile() as said:
            process = _spawn(lambda: self._popen(command, said.fileno(), user))
            try:
                begun(process.pid)
                if not self._is_up():
                    said.seek(0)
                    reason = said.read(2000).decode(errors="replace").strip()
                    raise LaunchFailed(reason.splitlines()[-1] if reason else "its first process ended at once")
            except BaseException:
                process.kill()
                process.wait()
                raise
            return process

    def _popen(self, command: Sequence[str], errors: int, user: int | None) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"},
            cwd="/",
            pass_fds=[self.control, *self.fds],
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )

    def _is_up(self) -> bool:
        self.theirs.close()  # so that the end of the init shows
        self.ours.settimeout(START_S)
        try:
            return self.ours.recv(1) == b"+"
        except TimeoutError:
            raise LaunchFailed(f"no answer within {START_S:.0f} s") from None
        finally:
            self.ours.settimeout(None)

    def close(self) -> None:
        """Close what only the launcher needed."""
        self.theirs.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def interpreter() -> str:
    """Return the path of the Python that boxes have: this one, without its virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


_spawner: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_spawner.clear)


def _spawn(start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Start a process in a thread that lives as long as this process: launchers end when the thread ends that started
    them."""
    if not _spawner:
        _spawner.append(ThreadPoolExecutor(1, thread_name_prefix="sandbox"))
    starting = _spawner[0].submit(start)
    try:
        return starting.result(START_S)
    except BaseException:
        if not starting.cancel():
            starting.add_done_callback(_end)
        raise


def _end(starting: Future[subprocess.Popen[bytes]]) -> None:
    """End a process that started too late."""
    if starting.exception() is None:
        starting.result().kill()
        starting.result().wait()
