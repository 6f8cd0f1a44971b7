"""The seccomp filter of a box: which system calls its programs may not make.

The filter is a classic BPF program over `struct seccomp_data` (number, architecture, instruction pointer, arguments).
A forbidden call fails with EPERM, so that programs see an ordinary error. `clone3` fails with ENOSYS, because a filter
cannot see its flags; the C library then uses `clone`. Calls of another architecture (32 bit, x32) end the process.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LOAD, JUMP_EQUAL, JUMP_SET, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
X32_BIT = 0x40000000
NEW_NAMESPACE = 0x7E020080
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME."""
NEW_NAMESPACE_OF_CLONE = NEW_NAMESPACE & ~0x80
"""`clone` has no NEWTIME: that bit belongs to the signal of the child's end."""
INTERNET = (2, 10)
"""AF_INET, AF_INET6: sockets of the box's own network. A socket of AF_UNIX could reach one of the host by its file."""
SHARED_PORT = (15,)
"""SO_REUSEPORT. With it, a program in a box that has the network of the machine could listen at the port of a server of
the same user, and get a part of the server's connections."""
UNIX = 1
DATAGRAM_BIT = 2
"""Set in SOCK_DGRAM and SOCK_RAW, not in SOCK_STREAM and SOCK_SEQPACKET. Half of a pair of datagram sockets could
connect to another address."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, which type into a terminal."""
PERSONALITY_QUERY = 0xFFFFFFFF

COMMON = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440,
    "mount_setattr": 442, "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448, "setxattrat": 463,
    "open_tree_attr": 467,
}  # fmt: skip
"""Numbers of newer calls, which are the same on every architecture."""
X86_64 = COMMON | {
    "shmget": 29, "semget": 64, "msgget": 68, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
    "ptrace": 101, "personality": 135, "uselib": 134, "ustat": 136, "sysfs": 139, "vhangup": 153,
    "io_setup": 206, "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156, "adjtimex": 159, "chroot": 161, "acct": 163,
    "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
    "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175, "delete_module": 176,
    "get_kernel_syms": 177, "query_module": 178, "quotactl": 179, "nfsservctl": 180, "lookup_dcookie": 212,
    "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249,
    "keyctl": 250, "migrate_pages": 256, "unshare": 272, "move_pages": 279, "vmsplice": 278, "perf_event_open": 298,
    "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "syslog": 103, 
}  # fmt: skip
AARCH64 = COMMON | {
    "io_setup": 0, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7,
    "lookup_dcookie": 18, "umount2": 39, "mount": 40, "pivot_root": 41, "nfsservctl": 42, "chroot": 51,
    "vhangup": 58, "quotactl": 60, "vmsplice": 75, "acct": 89, "personality": 92, "unshare": 97, "kexec_load": 104,
    "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142,
    "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171,
    "msgget": 186, "semget": 190, "shmget": 194, "add_key": 217,
    "request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225,
    "migrate_pages": 238, "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
    "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
    "kcmp": 272, "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
OTHERS_X86_64 = {
    "kill": 62, "rt_sigqueueinfo": 129, "setpriority": 141, "sched_setparam": 142, "sched_setscheduler": 144,
    "tkill": 200, "sched_setaffinity": 203, "tgkill": 234, "ioprio_set": 251, "rt_tgsigqueueinfo": 297,
    "sched_setattr": 314, "pidfd_send_signal": 424,
}  # fmt: skip
OTHERS_AARCH64 = {
    "ioprio_set": 30, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129,
    "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "setpriority": 140, "rt_tgsigqueueinfo": 240,
    "sched_setattr": 274, "pidfd_send_signal": 424,
}  # fmt: skip
SCHEDULING = ("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")
"""Calls with a process as the first argument. A 0 means the calling process."""
PRIORITIES = {"setpriority": 0, "ioprio_set": 1}
"""Calls that change a process, a process group or all processes of a user. The first argument says which of these the
second argument names. The value here means a process (PRIO_PROCESS, IOPRIO_WHO_PROCESS); a second argument of 0 then
means the calling process."""
CONDITIONAL = {"personality", "unshare"}
"""Calls in the tables that are forbidden with some arguments only."""
OWNERSHIP = (8, 10, 15)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX, by which a file sends any signal to another process."""
LEASES = (1024, 1026)
"""F_SETLEASE and F_NOTIFY. While a program has a lease on a file, other processes wait to open the file."""
MEMORY_MAP = (35,)
"""PR_SET_MM. With it, a process chooses which memory, of any size, /proc shows as its command line and environment."""
OWNERSHIP_BY_IOCTL = (0x8901, 0x8902)
"""FIOSETOWN and SIOCSPGRP, which do the same for sockets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Numbers of one processor architecture."""

    audit: int
    forbidden: dict[str, int]
    clone: int
    clone3: int
    socket: int
    socketpair: int
    setsockopt: int
    ioctl: int
    prlimit64: int
    fcntl: int
    prctl: int
    to_others: dict[str, int]
    """Calls that signal other processes or change their priority."""
    counted_by_user: dict[str, int]
    """Calls that use up what the kernel gives to all processes of a user together: watches of epoll and inotify."""


ARCHITECTURES = {
    "x86_64": Architecture(
        audit=0xC000003E,
        forbidden=X86_64,
        clone=56,
        clone3=435,
        socket=41,
        socketpair=53,
        setsockopt=54,
        ioctl=16,
        prlimit64=302,
        fcntl=72,
        prctl=157,
        to_others=OTHERS_X86_64,
        counted_by_user={"epoll_create": 213, "inotify_init": 253, "epoll_create1": 291, "inotify_init1": 294},
    ),
    "aarch64": Architecture(
        audit=0xC00000B7,
        forbidden=AARCH64,
        clone=220,
        clone3=435,
        socket=198,
        socketpair=199,
        setsockopt=208,
        ioctl=29,
        prlimit64=261,
        fcntl=25,
        prctl=167,
        to_others=OTHERS_AARCH64,
        counted_by_user={"epoll_create1": 20, "inotify_init1": 26},
    ),
}

Instruction = tuple[int, int, int, int]
"""Operation, jump if true, jump if false, constant."""


class UnknownArchitecture(OSError):
    """There is no filter for this processor."""


def program(machine: str = platform.machine(), *, shares_user: bool) -> bytes:
    """Return the filter as an array of `struct sock_filter`. `shares_user`: the box has no user of its own, but that of
    the run. Raises `UnknownArchitecture`."""
    return _packed(instructions(machine, shares_user=shares_user))


def lone_program(machine: str = platform.machine()) -> bytes:
    """Return the filter of a process that may not act on other processes. It comes on top of the filter of its box.
    Raises `UnknownArchitecture`."""
    return _packed(lone_instructions(machine))


def _packed(instructions: Sequence[Instruction]) -> bytes:
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)


def _architecture(machine: str) -> Architecture:
    if machine not in ARCHITECTURES:
        raise UnknownArchitecture(f"no seccomp filter for the processor architecture {machine}")
    return ARCHITECTURES[machine]


def lone_instructions(machine: str) -> list[Instruction]:
    its = _architecture(machine)
    return [
        *_head(machine),
        *_refuse(its.to_others.values()),
        *_when(its.fcntl, _none_of(1, OWNERSHIP)),
        *_when(its.ioctl, _none_of(1, OWNERSHIP_BY_IOCTL)),
        *_when(its.prlimit64, _only((0,))),
        _result(ALLOW),
    ]


def instructions(machine: str, *, shares_user: bool) -> list[Instruction]:
    its = _architecture(machine)
    refused = _result(ERROR | errno.EPERM)
    forbidden = [number for name, number in its.forbidden.items() if name not in CONDITIONAL]
    return [
        *_head(machine),
        *_refuse(forbidden),
        *_refuse(its.counted_by_user.values() if shares_user else ()),
        *_when(its.clone3, [_result(ERROR | errno.ENOSYS)]),
        *_when(its.clone, [*_argument(0), (JUMP_SET, 0, 1, NEW_NAMESPACE_OF_CLONE), refused]),
        *_when(its.forbidden["unshare"], [*_argument(0), (JUMP_SET, 0, 1, NEW_NAMESPACE), refused]),
        *_when(its.socket, _only(INTERNET)),
        *_when(its.socketpair, [*_argument(1), (JUMP_SET, 0, 1, DATAGRAM_BIT), refused, *_only((UNIX,))]),
        *_when(its.setsockopt, _none_of(2, SHARED_PORT)),
        *_when(its.ioctl, _none_of(1, TERMINAL_INPUT)),
        *_when(its.fcntl, _none_of(1, LEASES)),
        *_when(its.prctl, _none_of(0, MEMORY_MAP)),
        *_when(its.forbidden["personality"], _only((0, PERSONALITY_QUERY))),
        # Limits and priorities of other processes: with them, a program could starve the init.
        *_when(its.prlimit64, _only((0,))),
        *(piece for name in SCHEDULING for piece in _when(its.to_others[name], _only((0,)))),
        *(
            piece
            for name, process in PRIORITIES.items()
            for piece in _when(its.to_others[name], [*_only((process,)), *_only((0,), index=1)])
        ),
        _result(ALLOW),
    ]


def _head(machine: str) -> list[Instruction]:
    """End processes that call as another architecture does, and load the number of the call."""
    return [
        _load(ARCHITECTURE),
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine].audit),
        _result(KILL),
        _load(NUMBER),
        *([(JUMP_AT_LEAST, 0, 1, X32_BIT), _result(KILL)] if machine == "x86_64" else []),
    ]


def _refuse(values: Iterable[int]) -> list[Instruction]:
    """Refuse the call if one of these values is loaded."""
    return [piece for value in values for piece in ((JUMP_EQUAL, 0, 1, value), _result(ERROR | errno.EPERM))]


def _none_of(index: int, refused: Sequence[int]) -> list[Instruction]:
    """Refuse these values of an argument."""
    return [*_argument(index), *_refuse(refused)]


def _load(offset: int) -> Instruction:
    return (LOAD, 0, 0, offset)


def _result(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


def _argument(index: int) -> list[Instruction]:
    """Load the lower half of an argument. The kernel ignores the upper half of these arguments too."""
    return [_load(ARGUMENTS + 8 * index)]


def _only(allowed: Sequence[int], *, index: int = 0) -> list[Instruction]:
    """Refuse all values of an argument but these."""
    jumps = [(JUMP_EQUAL, len(allowed) - position, 0, value) for position, value in enumerate(allowed)]
    return [*_argument(index), *jumps, _result(ERROR | errno.EPERM)]


def _when(number: int, body: Sequence[Instruction]) -> list[Instruction]:
    """Run `body` for one system call, and allow the call if the body does not refuse it."""
    ending = _result(ALLOW)
    return [(JUMP_EQUAL, 0, len(body) + 1, number), *body, ending]
