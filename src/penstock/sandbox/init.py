"""The init of a box: starts programs inside, and ends everything that they leave (standard library only).

It is the first process of the box's pid namespace, so no program in the box can kill, stop or trace it, and the kernel
ends the box with it. It reads requests from one socket. Each request brings a connection of its own, and this process
answers there. It ends when the socket closes, and so with its creator. The creator must not trust its answers:
a program may find a way to change this process.

It runs with `python -I -S`. The small C modules are imported directly, because `socket`, `signal` and
`ctypes` take longer to import than everything else here.
"""

from __future__ import annotations

import _ctypes
import _signal  # type: ignore[import-not-found]
import _socket
import errno
import fcntl
import marshal
import os
import resource
import select
import stat
import struct
import sys
import time

TICK_MS = 100
"""Time between two looks at the time limits and at the numbers of files and sockets, while a program runs."""
MAX_FILES = 1 << 16
"""Most files and directories in one of the box's file systems, because its size does not count the names of files."""
MAX_SOCKETS, MAX_INTERNET_SOCKETS = 1024, 128
"""Most sockets of the box's own network, and most of them that are not of AF_UNIX. Their buffers count for no limit of
a process: up to half a megabyte for a socket, and ten for two connected TCP sockets."""
MAX_OPEN_FILES = 256
MAX_PENDING_SIGNALS = 256
CHUNK = 1 << 16
ROUNDS = 100
"""Most looks for processes that are to be killed, while other programs in the box must live."""
IS_FIRST = os.getpid() == 1
"""Whether a pid namespace holds everything that programs start. If not (`none`), the init adopts and kills it."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
CAPABILITY_VERSION = 0x20080522
ENDED = struct.Struct("<idBII")
"""Return code, processor seconds, whether time ran out, sizes of the two outputs that follow."""
STARTED = struct.Struct("<i")
"""Process id of a program in the box."""
DONE = struct.Struct("<iI")
"""Error number (0: none), size of the content that follows."""


def libc(name: str, *arguments: object) -> int:
    """Call a function of the C library."""
    own = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
    return int(_ctypes.call_function(_ctypes.dlsym(own, name), arguments))


def harden(uid: int) -> None:
    """Give up root, if the box starts as root, and close this process to the others in the box."""
    os.umask(0o022)
    for signum in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT):
        _signal.signal(signum, _signal.SIG_IGN)
    for capability in range(64) if IS_FIRST else ():
        libc("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if IS_FIRST:
        libc("capset", struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24))
        libc("prctl", PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)  # a change of the user has cleared it
    else:
        libc("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Program:
    """One program: its process, its pipes, and the connection on which its creator waits."""

    def __init__(self, connection: _socket.socket, request: dict, fds: list[int]) -> None:  # type: ignore[type-arg]
        self.connection, self.limits = connection, request["limits"]
        self.given: bytes = request["stdin"]
        self.outputs: dict[int, list[bytes]] = {}
        self.num_bytes: dict[int, int] = {}
        self.deadline = time.monotonic() + self.limits["wall_s"] if self.limits["wall_s"] else None
        self.in_time = True
        self.cpu_s = 0.0
        self.returncode: int | None = None
        self.stdin = -1
        self.order: list[int] = []
        wired = self._pipes(request, fds)
        self.pid = os.fork()
        if self.pid == 0:
            execute(request, wired)
        for fd in wired.values():
            os.close(fd)
        self.pidfd = os.pidfd_open(self.pid)
        if not request["is_waited_for"]:
            self.connection.send(STARTED.pack(self.pid))

    def _pipes(self, request: dict, fds: list[int]) -> dict[int, int]:  # type: ignore[type-arg]
        """Return the files of the program, by the numbers that they will have there."""
        wired = dict(zip(request["fds"], fds, strict=True))
        if not request["is_waited_for"]:
            for number in {0, 1, 2} - wired.keys():
                wired[number] = os.open("/dev/null", os.O_RDWR)
            return wired
        wired[0], self.stdin = os.pipe()
        for number in (1, 2):
            ours, wired[number] = os.pipe()
            self.order.append(ours)
            self.outputs[ours], self.num_bytes[ours] = [], 0
            os.set_blocking(ours, False)
        os.set_blocking(self.stdin, False)
        self.feed()
        return wired

    def feed(self) -> None:
        """Write what the pipe takes of standard input."""
        try:
            while self.given:
                self.given = self.given[os.write(self.stdin, self.given[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:
            self.given = b""
        os.close(self.stdin)
        self.stdin = -1

    def read(self, fd: int) -> bool:
        """Read a piece of the program's output. Keep its beginning. Return whether there was any."""
        try:
            piece = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        kept = self.limits["output_bytes"] - self.num_bytes[fd]
        if kept > 0:
            self.outputs[fd].append(piece[:kept])
        self.num_bytes[fd] += len(piece)
        if not piece or self.num_bytes[fd] > self.limits["file_bytes"]:
            self.close(fd)
            return False
        return True

    def close(self, fd: int) -> None:
        os.close(fd)
        del self.num_bytes[fd]

    def kill(self) -> None:
        if self.returncode is None:
            _signal.pidfd_send_signal(self.pidfd, _signal.SIGKILL)

    def reap(self) -> bool:
        """Return whether the program has ended."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
            self.cpu_s = usage.ru_utime + usage.ru_stime
        return pid != 0

    def answer(self) -> None:
        """Say how it ended. Everything that it started is gone, so the pipes hold all that will ever come."""
        for fd in list(self.num_bytes):
            while fd in self.num_bytes and self.read(fd):
                pass
            if fd in self.num_bytes:
                self.close(fd)
        for fd in (self.pidfd, *([self.stdin] if self.stdin >= 0 else [])):
            os.close(fd)
        texts = [b"".join(self.outputs[fd]) for fd in self.order] or [b"", b""]
        sizes = (len(texts[0]), len(texts[1]))
        send(self.connection, ENDED.pack(self.returncode, self.cpu_s, not self.in_time, *sizes), *texts)


def execute(request: dict, wired: dict[int, int]) -> None:  # type: ignore[type-arg]
    """Become the program, in the forked child. This does not return."""
    status = 127
    try:
        os.setsid()
        for signum in (
            _signal.SIGINT,
            _signal.SIGTERM,
            _signal.SIGHUP,
            _signal.SIGQUIT,
            _signal.SIGPIPE,
            _signal.SIGXFSZ,
        ):
            _signal.signal(signum, _signal.SIG_DFL)
        free = max(MAX_OPEN_FILES, *wired) + 1
        aside = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for number, fd in wired.items()}
        for number, fd in aside.items():
            os.dup2(fd, number)
        os.chdir(request["cwd"])
        restrict(request["limits"])
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        status = 126 if error.errno == errno.EACCES else 127
        os.write(2, f"{request['argv'][0]}: {error.strerror}\n".encode(errors="replace"))
    except BaseException as error:  # the child must not return into the loop of its parent
        os.write(2, f"{error}\n".encode(errors="replace"))
    finally:
        os._exit(status)


def restrict(limits: dict) -> None:  # type: ignore[type-arg]
    """Set hard limits. A process that reaches one is killed, or its request is refused. It cannot raise the limit."""
    for kind, limit in (
        (resource.RLIMIT_CPU, limits["cpu_s"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NPROC, limits["max_processes"] + 1 if IS_FIRST else None),  # this process counts too
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, MAX_PENDING_SIGNALS),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        if limit is not None:
            resource.setrlimit(kind, (limit, limit))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # if memory runs out, the kernel ends programs before anything else
    except OSError:
        pass


def receive(connection: _socket.socket) -> dict:  # type: ignore[type-arg]
    """Read one request."""
    (size,) = struct.unpack("<I", read_exactly(connection, 4))
    return dict(marshal.loads(read_exactly(connection, size)))


def read_exactly(connection: _socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        got = connection.recv_into(view[filled:])
        if not got:
            raise EOFError
        filled += got
    return bytes(buffer)


def send(connection: _socket.socket, *pieces: bytes) -> None:
    try:
        for piece in pieces:
            connection.sendall(piece)
    except OSError:
        pass  # its creator waits no longer
    connection.close()


def write_file(work: str, name: str, content: bytes) -> bytes:
    with open(open_inside(work, name, os.O_WRONLY | os.O_CREAT), "wb") as file:
        os.ftruncate(file.fileno(), 0)
        file.write(content)
    return b""


def read_file(work: str, name: str, num_bytes: int) -> bytes:
    with open(open_inside(work, name, os.O_RDONLY), "rb") as file:
        return file.read(num_bytes)


def make_folder(name: str, parent: int) -> None:
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:
        return


def open_inside(work: str, name: str, flags: int) -> int:
    """Return the number of a plain file below the work directory. It is opened folder by folder, so that no
    link leads out, however programs change the folders meanwhile. `O_CREAT` also makes folders."""
    *folders, base = name.split("/")
    at = os.open(work, os.O_PATH | os.O_DIRECTORY)
    try:
        for folder in folders:
            if flags & os.O_CREAT:
                make_folder(folder, at)
            inner = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            os.close(at)
            at = inner
        fd = os.open(base, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


class Init:
    """The loop: requests, output of programs, and their ends."""

    def __init__(self, control: _socket.socket, work: str, has_own_network: bool) -> None:
        self.control, self.work, self.has_own_network = control, work, has_own_network
        self.programs: list[Program] = []

    def serve(self) -> None:
        """Answer requests until the socket closes."""
        self.control.send(b"+")
        while True:
            poll = select.poll()
            poll.register(self.control.fileno(), select.POLLIN)
            handlers = {}
            for program in self.programs:
                for fd, events, handler in self._watched(program):
                    poll.register(fd, events)
                    handlers[fd] = handler
            ready = poll.poll(TICK_MS if self.programs else None)
            for fd, _ in ready:
                if fd in handlers:
                    handlers[fd]()
            self._look()
            if any(fd == self.control.fileno() for fd, _ in ready) and not self._take():
                break
        self.programs.clear()
        self._end_others()

    def _watched(self, program: Program) -> list:  # type: ignore[type-arg]
        watched: list = [(program.pidfd, select.POLLIN, lambda: None)]  # type: ignore[type-arg]
        watched.append((program.connection.fileno(), select.POLLIN, program.kill))
        if program.stdin >= 0:
            watched.append((program.stdin, select.POLLOUT, program.feed))
        for fd in program.num_bytes:
            watched.append((fd, select.POLLIN, lambda fd=fd: program.read(fd)))
        return watched

    def _look(self) -> None:
        """End programs that are out of time, and answer for those that ended."""
        now = time.monotonic()
        for program in list(self.programs):
            if program.deadline is not None and now > program.deadline and program.returncode is None:
                program.in_time = False
                program.kill()
            if program.reap():
                self.programs.remove(program)
                self._end_others()
                program.answer()
        if self.programs and self._is_crowded():
            for program in self.programs:
                program.kill()
        self._reap_orphans()

    def _is_crowded(self) -> bool:
        found = (os.statvfs(path) for path in {self.work, "/tmp", "/dev/shm"}) if IS_FIRST else ()
        if any(stats.f_files - stats.f_ffree > MAX_FILES for stats in found):
            return True
        if not self.has_own_network:
            return False
        num_all, num_internet = count_sockets()
        return num_all > MAX_SOCKETS or num_internet > MAX_INTERNET_SOCKETS

    def _take(self) -> bool:
        """Take one request. Return whether there was one; the socket is closed otherwise."""
        message, ancillary, _, _ = self.control.recvmsg(1, 4096, _socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        fds = [fd for _, _, data in ancillary for (fd,) in struct.iter_unpack("i", data[: len(data) // 4 * 4])]
        connection = _socket.socket(fileno=fds[0])
        try:
            self._answer(connection, receive(connection), fds[1:])
        except EOFError:
            connection.close()
        return True

    def _answer(self, connection: _socket.socket, request: dict, fds: list[int]) -> None:  # type: ignore[type-arg]
        try:
            if "argv" in request:
                self.programs.append(Program(connection, {**request, "cwd": self.work}, fds))
                return
            where = (self.work, request["name"])
            writes = "content" in request
            content = write_file(*where, request["content"]) if writes else read_file(*where, request["most"])
            send(connection, DONE.pack(0, len(content)), content)
        except OSError as error:
            failed = DONE.pack(error.errno or errno.EIO, 0)
            send(connection, ENDED.pack(127, 0.0, False, 0, 0) if "argv" in request else failed)

    def _end_others(self) -> None:
        """Kill all processes that do not belong to a living program, and wait for their ends."""
        if IS_FIRST and not self.programs:
            kill(-1)  # everything in this pid namespace but this process, in one step
            self._await_orphans()
            return
        for _ in range(ROUNDS):
            strays = [pid for pid in children(os.getpid()) if pid not in {program.pid for program in self.programs}]
            family = [*strays]
            for pid in family:
                family += children(pid)
            for pid in family:
                kill(pid)
            self._reap_orphans()
            if not strays:
                return
            time.sleep(0.001)
        for program in self.programs:
            program.kill()

    def _await_orphans(self) -> None:
        try:
            while True:
                os.waitpid(-1, 0)
        except ChildProcessError:
            return

    def _reap_orphans(self) -> None:
        """Reap children that no program waits for any more."""
        own = {program.pid for program in self.programs}
        for pid in children(os.getpid()):
            if pid not in own:
                reap(pid)


def kill(pid: int) -> None:
    try:
        os.kill(pid, _signal.SIGKILL)
    except ProcessLookupError:
        return


def reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


def children(pid: int) -> list[int]:
    """Return the children of a process, adopted ones included."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def count_sockets() -> tuple[int, int]:
    """Return how many sockets this network has, and how many of them are not of AF_UNIX. A closed TCP socket with data
    to read is in no list, but counts among all."""
    try:
        with open("/proc/net/sockstat") as file:
            num_all = int(file.readline().split()[2])  # sockets: used N
        with open("/proc/net/unix") as file:
            num_unix = sum(1 for _ in file) - 1
    except (OSError, ValueError, IndexError):
        return 0, 0
    return num_all, num_all - num_unix


def main(control_fd: int, work: str, uid: int, has_own_network: bool) -> None:
    """Serve the box. `uid`: the user to become; -1 keeps the user."""
    harden(uid)
    os.closerange(3, control_fd)
    os.closerange(control_fd + 1, 1 << 16)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.set_inheritable(control_fd, False)
    Init(_socket.socket(fileno=control_fd), work, has_own_network).serve()
    if not IS_FIRST:  # the box's files do not end with a mount namespace
        os.execv("/bin/rm", ["rm", "-rf", "--", work])


if __name__ == "__main__":
    main(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), IS_FIRST and sys.argv[5] == "apart")
