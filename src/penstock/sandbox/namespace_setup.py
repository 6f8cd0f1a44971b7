"""Makes the namespaces and mounts of a box without bubblewrap, and then becomes its init (standard library only).

A process outside the box waits for the init, which is the first process of the pid namespace, and each dies with the
other. The mounts are made as bubblewrap makes them: a temporary file system becomes the root, and the old root moves
aside. Then the new root is filled, made read-only and entered, and the old one disappears.
"""

from __future__ import annotations

import ctypes
import fcntl
import marshal
import os
import signal
import socket
import struct
import sys
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_SLAVE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x80000
MNT_DETACH = 2
SYS_MOUNT_SETATTR = 442
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 0x1, 0x2, 0x4
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
READ_ONLY_OF_PROC = ("sys", "irq", "bus", "fs")
LIBC = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: Any) -> None:
    """Call a function of the C library. Raises OSError, which names the function and its first argument."""
    if getattr(LIBC, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name} {arguments[:2]}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def set_attributes(path: str, attributes: int, *, recursive: bool = True) -> None:
    """Add attributes to a mount and, if `recursive`, to all mounts below it."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, wanted, ctypes.c_size_t(len(wanted)))


def bind(source: str, target: str, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    mount(source, target, "", MS_BIND | MS_REC)
    set_attributes(target, attributes)


def unshare(spec: dict[str, Any]) -> None:
    """Enter new namespaces. The next child is the first process of the new pid namespace."""
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID
    flags |= 0 if spec["network"] else CLONE_NEWNET
    flags |= CLONE_NEWUSER if spec["unshares_user"] else 0
    call("unshare", flags)
    if spec["unshares_user"]:
        for name, content in (
            ("setgroups", "deny"),
            ("uid_map", f"{spec['uid']} {uid} 1"),
            ("gid_map", f"{spec['uid']} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)


def enter(spec: dict[str, Any]) -> None:
    """Build the file systems of the box and make them the root."""
    mount("", "/", "", MS_REC | MS_SLAVE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    call("syscall", spec["pivot_root"], b"/tmp", b"/tmp/old")
    os.chdir("/")
    mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={spec['read_only_bytes']}")
    fill(spec)
    call("umount2", b"/old", MNT_DETACH)
    os.chdir("/new")
    call("syscall", spec["pivot_root"], b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def fill(spec: dict[str, Any]) -> None:
    for path, target in spec["links"].items():
        os.symlink(target, f"/new{path}")
    make_proc(spec)
    make_devices()
    for path in spec["sized"]:  # before the binds, because what the box may read can lie below /tmp
        os.makedirs(f"/new{path}", exist_ok=True)
        mount("tmpfs", f"/new{path}", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={spec['work_bytes']}")
    for path in spec["stays"]:
        os.mkdir(f"/new{path}")
        mount("tmpfs", f"/new{path}", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={spec['read_only_bytes']}")
    for path in spec["binds"]:
        bind(f"/old{path}", f"/new{path}", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    for path, content in spec["texts"].items():
        os.makedirs(os.path.dirname(f"/new{path}"), exist_ok=True)
        with open(f"/new{path}", "wb") as file:
            file.write(content)
    for path in spec["loose"]:
        mount(f"/new{path}", f"/new{path}", "", MS_BIND)
        set_attributes(f"/new{path}", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    for path in (*spec["stays"], "/dev", ""):
        set_attributes(f"/new{path}", ATTR_RDONLY, recursive=False)


def make_proc(spec: dict[str, Any]) -> None:
    os.mkdir("/new/proc")
    mount("proc", "/new/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if spec["unshares_user"]:
        with open("/new/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    for name in filter(lambda name: os.path.isdir(f"/new/proc/{name}"), READ_ONLY_OF_PROC):
        bind(f"/new/proc/{name}", f"/new/proc/{name}", ATTR_RDONLY)
    for path in spec["masked"]:
        mount("/old/dev/null", f"/new{path}", "", MS_BIND)


def make_devices() -> None:
    os.mkdir("/new/dev")
    mount("tmpfs", "/new/dev", "tmpfs", MS_NOSUID, "mode=755,size=1m")
    for name in DEVICES:
        bind(f"/old/dev/{name}", f"/new/dev/{name}", ATTR_NOSUID)
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"/new/dev/{name}")
    os.mkdir("/new/dev/pts")
    mount("devpts", "/new/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


def install_filter(program: bytes) -> None:
    """Forbid the system calls that the seccomp filter names, for this process and all that it starts."""
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    kept = ctypes.create_string_buffer(program, len(program))
    wanted = struct.pack("@HP", len(program) // 8, ctypes.addressof(kept))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, wanted, 0, 0)


def main() -> None:
    """Start the init and wait for it. Arguments: the files of the specification and of the init, and the init's own."""
    os.umask(0o022)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    spec_fd, init_fd, control, *others = sys.argv[2:]
    with open(int(spec_fd), "rb") as file:
        spec = marshal.load(file)
    unshare(spec)
    child = os.fork()
    if child:
        os.closerange(3, 1 << 16)  # the end of the init's socket must show
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    socket.sethostname("box")
    if not spec["network"]:
        raise_loopback()
    enter(spec)
    install_filter(spec["seccomp"])
    sys.argv = ["", init_fd, control, *others]


try:
    main()
except OSError as error:
    sys.stderr.write(f"{error.strerror}\n")
    os._exit(1)
with open(int(sys.argv[1]), "rb") as code:
    exec(marshal.load(code))
