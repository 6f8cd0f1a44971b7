"""Programs that try to get out of a sandbox, and a command that runs them: `python escapes.py BACKEND` prints what each
of them gained, as JSON. The tests run the command as root and as an ordinary user.

A program says `ESCAPED` and what it gained. Every program has a box of its own, and the box must work afterwards.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from penstock.sandbox import Limits, Outcome, open_box, python, select
from penstock.sandbox.seccomp import ARCHITECTURES

MIB = 1 << 20
LIMITS = Limits(
    wall_s=10.0,
    cpu_s=5,
    memory_bytes=256 * MIB,
    max_processes=24,
    file_bytes=4 * MIB,
    output_bytes=8 << 10,
    work_bytes=8 * MIB,
)
SECRET = "penstock-" + "secret-"
PRELUDE = """
import ctypes, errno, glob, json, os, signal, socket, stat, struct, subprocess, sys, threading, time
T = json.loads(os.environ["TARGETS"])
LIBC = ctypes.CDLL(None, use_errno=True)
SECRET = b"penstock-" + b"secret-"
def escaped(*gained): print("ESCAPED", *gained)
def call(name, *arguments): return LIBC.syscall(T["numbers"][name], *arguments)
def calls(name, *arguments):
    if call(name, *arguments) >= 0: escaped(name)
def reads(path):
    try:
        with open(path, "rb") as file: found = file.read(4096)
    except OSError: return
    if found: escaped("read", path, found[:20])
def writes(path):
    try: os.close(os.open(path, os.O_WRONLY))
    except OSError: return
    escaped("may write", path)
def makes(path):
    try: os.close(os.open(path, os.O_WRONLY | os.O_CREAT))
    except OSError: return
    escaped("made", path)
def socket_of(*kind):
    try: socket.socket(*kind).close()
    except OSError: return
    escaped("a socket", *kind)
def connects(family, address):
    try:
        with socket.socket(family) as mine:
            mine.settimeout(2)
            mine.connect(address)
    except OSError: return
    escaped("connected", address)
"""
ESCAPES = {
    "shadow": "for path in ('/etc/shadow', '/etc/gshadow', '/etc/sudoers', '/etc/ssh/ssh_host_ed25519_key'): reads(path)",
    "home": "reads(T['home'] + '/.ssh/id_ed25519')",
    "run_directory": "reads(T['run_dir'] + '/config.yaml')",
    "runtime_directory": "reads(T['runtime_dir'] + '/keys')",
    "root_directory": """
known = {'bin', 'dev', 'etc', 'lib', 'lib32', 'lib64', 'libx32', 'proc', 'sbin', 'tmp', 'usr', 'work'}
extra = set(os.listdir('/')) - known - {sys.base_prefix.split('/')[1]}
if extra: escaped(extra)
""",
    "beside_the_interpreter": """
folder = os.path.dirname(sys.base_prefix)
while folder not in ('/', '/usr'):
    if len(os.listdir(folder)) > 1: escaped(folder, os.listdir(folder))
    folder = os.path.dirname(folder)
""",
    "own_environment": """
names = set(os.environ) - {'PATH', 'LANG', 'LC_CTYPE', 'HOME', 'TMPDIR', 'PYTHONDONTWRITEBYTECODE', 'TARGETS'}
if names: escaped(names)
""",
    "environments_of_others": """
for path in glob.glob('/proc/[0-9]*/environ'):
    if path.split('/')[2] == str(os.getpid()): continue
    try: found = open(path, 'rb').read()
    except OSError: continue
    if SECRET in found: escaped(path)
""",
    "the_worker": """
for path in glob.glob('/proc/[0-9]*/cmdline'):
    if b'escapes' + b'.py' in open(path, 'rb').read(): escaped(path)
""",
    "other_processes": "if len(glob.glob('/proc/[0-9]*')) > 2: escaped(glob.glob('/proc/[0-9]*'))",
    "files_of_init": """
for name in ('environ', 'mem', 'maps', 'auxv', 'stack', 'syscall'): reads(f'/proc/1/{name}')
for name in ('fd', 'root', 'cwd', 'map_files'):
    try: escaped(name, os.listdir(f'/proc/1/{name}'))
    except OSError: pass
""",
    "memory_of_init": "writes('/proc/1/mem'); writes('/proc/1/oom_score_adj')",
    "write_usr": "makes('/usr/x'); makes('/usr/bin/x'); makes('/usr/local/bin/x'); writes('/usr/bin/true')",
    "write_etc": "makes('/etc/x'); writes('/etc/passwd'); writes('/etc/group'); writes('/etc/ld.so.cache')",
    "write_interpreter": "makes(sys.base_prefix + '/x'); writes(os.__file__); writes(os.path.realpath(sys.executable))",
    "write_root": "makes('/x'); makes('/proc/x'); makes('/etc/ld.so.preload')",
    "write_dev": "makes('/dev/x'); makes('/dev/pts/x')",
    "write_tmp_of_the_host": "open('/tmp/' + T['mark'], 'w').close()",
    "write_shm_of_the_host": "open('/dev/shm/' + T['mark'], 'w').close()",
    "core_pattern": "writes('/proc/sys/kernel/core_pattern')",
    "sysrq": "writes('/proc/sysrq-trigger')",
    "proc_sys": """
for folder, _, names in os.walk('/proc/sys'):
    for name in names: writes(os.path.join(folder, name))
""",
    "kernel_memory": "for path in ('/proc/kcore', '/proc/kmsg', '/proc/keys', '/proc/kallsyms', '/dev/kmsg'): reads(path)",
    "sys": "if os.path.exists('/sys') and os.listdir('/sys'): escaped(os.listdir('/sys'))",
    "control_groups": """
for path in ('/sys/fs/cgroup', *glob.glob('/sys/fs/cgroup/*')):
    if os.access(path, os.W_OK): escaped(path)
""",
    "devices": """
allowed = {'null', 'zero', 'full', 'random', 'urandom', 'tty', 'ptmx'}
for folder, folders, names in os.walk('/dev'):
    for name in names:
        mode = os.lstat(os.path.join(folder, name)).st_mode
        if (stat.S_ISBLK(mode) or stat.S_ISCHR(mode)) and name not in allowed: escaped(folder, name)
""",
    "virtual_machines": "writes('/dev/kvm'); writes('/dev/vhost-vsock'); writes('/dev/net/tun'); writes('/dev/fuse')",
    "make_a_device": """
for kind, major, minor in ((stat.S_IFBLK, 254, 0), (stat.S_IFBLK, 8, 0), (stat.S_IFCHR, 1, 1)):
    try: os.mknod('disk', kind | 0o666, os.makedev(major, minor))
    except OSError: continue
    escaped('a device')
""",
    "become_root": """
for change in (os.setuid, os.setgid, os.seteuid):
    try: change(0)
    except OSError: continue
    escaped(change)
try: os.setgroups([0]); escaped('setgroups')
except OSError: pass
""",
    "setuid_programs": """
for command in (['su', '-c', 'id -u'], ['sudo', '-n', 'id', '-u'], ['pkexec', 'id', '-u'], ['newgrp', 'root']):
    try: said = subprocess.run(command, input='', capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired): continue
    if said.strip() == '0': escaped(command)
""",
    "own_setuid_program": """
import shutil
shutil.copy('/bin/sh', 'mine'); os.chmod('mine', 0o6755)
said = subprocess.run(['./mine', '-c', 'grep -E "Cap(Eff|Prm|Inh|Bnd|Amb)" /proc/self/status'], capture_output=True, text=True).stdout
if any(int(line.split()[1], 16) for line in said.splitlines()): escaped(said)
""",
    "capabilities": """
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb'):
    if int(status[name], 16): escaped(name, status[name])
if status['NoNewPrivs'].strip() != '1' or status['Seccomp'].strip() != '2': escaped('no filter')
if '0' in status['Uid'].split(): escaped('root')
""",
    "chroot": "calls('chroot', b'/work')",
    "mount": "calls('mount', b'none', b'/work', b'tmpfs', 0, b'')",
    "replace_what_it_sees_read_only": """
for given in T['given']:
    for place in (given, *(os.path.normpath(given + '/..' * up) for up in (1, 2))):
        for change in (lambda: os.rename(place, place + '.gone'), lambda: os.rename(place, '/tmp/gone'),
                       lambda: os.rmdir(place), lambda: os.symlink('/work', place + '/new'), lambda: os.chmod(place, 0o777)):
            try: change()
            except OSError: continue
            escaped('changed', place)
    try: os.makedirs(given)
    except OSError: pass
    try:
        with open(given + '/file', 'w') as file: file.write('forged')
    except OSError: pass
    with open(given + '/file') as file:
        if file.read() != 'given': escaped('replaced', given)
with open('/tmp/beside', 'w') as file: file.write('still writable')
""",
    "bind_mount": "calls('mount', b'/proc/1/root', b'/work', b'', 0x1000, b'')",
    "remount": "calls('mount', b'', b'/usr', b'', 0x20 | 0x1000, b''); calls('mount', b'', b'/', b'', 0x20, b'')",
    "umount": "[calls('umount2', path, 2) for path in (b'/usr', b'/work', b'/tmp', b'/proc', b'/proc/sys', b'/etc/passwd')]",
    "new_mount_calls": """
calls('fsopen', b'tmpfs', 0); calls('open_tree', -100, b'/usr', 1); calls('fspick', -100, b'/usr', 0)
calls('mount_setattr', -100, b'/usr', 0, struct.pack('=QQQQ', 0, 1, 0, 0), 32)
calls('move_mount', -100, b'/usr', -100, b'/work', 0)
""",
    "pivot_root": "calls('pivot_root', b'/work', b'/work')",
    "new_namespaces": """
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x4000000, 0x2000000, 0x80):
    for added in (0, 0x10000000):
        if call('unshare', flag | added) == 0: escaped(hex(flag | added))
""",
    "unshare_command": """
said = subprocess.run(['unshare', '-Urm', 'id', '-u'], capture_output=True, text=True).stdout
if said: escaped(said)
""",
    "clone_a_user_namespace": """
for flag in (0x10000000, 0x20000, 0x40000000):
    pid = LIBC.syscall(T['clone'], flag | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    if pid > 0: escaped(hex(flag))
""",
    "clone3": """
arguments = struct.pack('=11Q', 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
pid = LIBC.syscall(435, arguments, len(arguments))
if pid == 0: os._exit(0)
if pid > 0 or ctypes.get_errno() != errno.ENOSYS: escaped(pid)
""",
    "enter_namespaces": """
for path in glob.glob('/proc/*/ns/*'):
    try: fd = os.open(path, os.O_RDONLY)
    except OSError: continue
    calls('setns', fd, 0); os.close(fd)
""",
    "ptrace": "calls('ptrace', 16, 1, 0, 0); calls('ptrace', 0x4206, 1, 0, 0); calls('ptrace', 0, 0, 0, 0)",
    "memory_calls": """
buffer = ctypes.create_string_buffer(8)
part = struct.pack('@PN', ctypes.addressof(buffer), 8)
calls('process_vm_readv', 1, part, 1, part, 1, 0); calls('process_vm_writev', 1, part, 1, part, 1, 0)
fd = os.pidfd_open(1); calls('pidfd_getfd', fd, 3, 0); calls('process_madvise', fd, part, 1, 4, 0)
calls('kcmp', 1, 1, 0, 0, 0)
""",
    "kill_everything": "signal.signal(15, signal.SIG_IGN); os.kill(-1, 15); os.kill(-1, 9)",
    "kill_init": """
for number in range(1, 65):
    try: os.kill(1, number)
    except OSError: pass
fd = os.pidfd_open(1); signal.pidfd_send_signal(fd, 9); os.killpg(1, 9)
""",
    "starve_init": """
if LIBC.syscall(T['prlimit64'], 1, 0, struct.pack('QQ', 1, 1), None) == 0: escaped('processor time of init')
if LIBC.syscall(T['prlimit64'], 1, 7, struct.pack('QQ', 0, 0), None) == 0: escaped('files of init')
""",
    "demote_init": """
idle = os.sched_param(0)
attributes = struct.pack('=IIQiIQQQ', 48, os.SCHED_IDLE, 0, 0, 0, 0, 0, 0)
tries = {
    'processors': lambda pid: os.sched_setaffinity(pid, {max(os.sched_getaffinity(0))}),
    'policy': lambda pid: os.sched_setscheduler(pid, os.SCHED_IDLE, idle),
    'parameters': lambda pid: os.sched_setparam(pid, idle),
    'attributes': lambda pid: must('sched_setattr', pid, attributes, 0),
    'priority': lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    'group priority': lambda pid: os.setpriority(os.PRIO_PGRP, pid, 19),
    'priority of its user': lambda pid: os.setpriority(os.PRIO_USER, 0, 19),
    'priority of input': lambda pid: must('ioprio_set', 1, pid, 3 << 13),
    'priority of input of its user': lambda pid: must('ioprio_set', 3, 0, 3 << 13),
}
def must(name, *arguments):
    if call(name, *arguments): raise OSError(ctypes.get_errno(), name)
for name, attempt in tries.items():
    try: attempt(1)
    except OSError: continue
    escaped(name, 'of init')
os.sched_setaffinity(0, os.sched_getaffinity(0)); os.setpriority(os.PRIO_PROCESS, 0, 5)  # its own it may change
""",
    "kill_the_host": """
for pid in T['pids']:
    try: os.kill(pid, 9)
    except OSError: pass
""",
    "raise_limits": """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    try: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    except (OSError, ValueError): continue
    escaped(kind)
""",
    "fork_bomb": """
num = 0
try:
    while num < 100:
        if os.fork() == 0: time.sleep(30); os._exit(0)
        num += 1
except OSError: pass
if num > 24: escaped(num, 'processes')
""",
    "endless_fork_bomb": """
while True:
    try: os.fork()
    except OSError: pass
""",
    "thread_bomb": """
threads = []
try:
    while len(threads) < 100:
        threads.append(threading.Thread(target=time.sleep, args=(1,), daemon=True)); threads[-1].start()
except RuntimeError: pass
if len(threads) > 26: escaped(len(threads), 'threads')
os._exit(0)
""",
    "memory_bomb": """
try: held = bytearray(1 << 30); escaped(len(held))
except MemoryError: pass
""",
    "hidden_memory": """
calls('memfd_create', b'x', 0); calls('shmget', 0, 1 << 20, 0o1600)
calls('semget', 0, 32000, 0o1600); calls('msgget', 0, 0o1600)
if 'memfd_secret' in T['numbers']: calls('memfd_secret', 0)
open('listed', 'w').close()
entries = [(1, 6, -1), *((2, 6, 1000 + user) for user in range(100)), (4, 6, -1), (16, 6, -1), (32, 6, -1)]
acl = struct.pack('<I', 2) + b''.join(struct.pack('<HHi', *entry) for entry in entries)
calls('setxattr', b'listed', b'system.posix_acl_access', acl, len(acl), 0)
calls('lsetxattr', b'listed', b'system.posix_acl_access', acl, len(acl), 0)
calls('fsetxattr', os.open('listed', os.O_RDONLY), b'system.posix_acl_access', acl, len(acl), 0)
""",
    "fill_the_disk": """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
total = 0
for folder in ('/work', '/tmp', '/dev/shm', '/dev', '/', '/etc', '/usr', '/var/tmp', '/run'):
    try:
        for number in range(20):
            with open(f'{folder}/fill{number}', 'wb', buffering=0) as file:
                while True: total += file.write(bytes(1 << 20))
    except OSError as error:
        if error.errno == errno.EFBIG: continue
if total > 3 * (8 << 20): escaped(total, 'bytes')
""",
    "one_large_file": """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    with open('large', 'wb', buffering=0) as file:
        while file.write(bytes(1 << 20)): pass
except OSError: pass
if os.stat('large').st_size > 4 << 20: escaped(os.stat('large').st_size)
""",
    "flood": "while True: print('x' * 1000)",
    "flood_of_errors": "while True: sys.stderr.write('x' * 1000)",
    "endless": """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(600)
""",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: os.execvp('sleep', ['sleep', T['daemon']])
    os._exit(0)
""",
    "loopback": "connects(socket.AF_INET, ('127.0.0.1', T['port']))",
    "abstract_socket": "connects(socket.AF_UNIX, '\\0' + T['mark'])",
    "socket_file": "connects(socket.AF_UNIX, T['runtime_dir'] + '/bus')",
    "vsock": "socket_of(40, socket.SOCK_STREAM)",
    "netlink": "socket_of(16, socket.SOCK_RAW, 0); socket_of(16, socket.SOCK_RAW, 9); socket_of(16, socket.SOCK_RAW, 15)",
    "packets": "socket_of(17, socket.SOCK_RAW); socket_of(socket.AF_INET, socket.SOCK_RAW, 1)",
    "other_families": "[socket_of(family, kind) for family in range(46) if family not in (1, 2, 10) for kind in (1, 2, 3, 5)]",
    "interfaces": """
names = {line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]}
if names != {'lo'}: escaped(names)
""",
    "inherited_files": """
for name in os.listdir('/proc/self/fd'):
    try: target = os.readlink(f'/proc/self/fd/{name}')
    except OSError: continue
    if not target.startswith(('pipe:', '/proc/')): escaped(name, target)
""",
    "terminal": """
import fcntl
for fd in (0, 1, 2):
    for code in (0x5412, 0x541C):
        try: fcntl.ioctl(fd, code, b'x')
        except OSError as error:
            if error.errno != errno.EPERM: escaped(code, error)
try: os.open('/dev/tty', os.O_RDWR); escaped('a terminal')
except OSError: pass
""",
    "leases": """
import fcntl
for name in (os.__file__, json.__file__, sys.executable, '/work/mine'):
    fd = os.open(name, os.O_RDONLY | (os.O_CREAT if name == '/work/mine' else 0))
    for code, wanted in ((1024, fcntl.F_RDLCK), (1024, fcntl.F_WRLCK), (1026, 1)):
        try: fcntl.fcntl(fd, code, wanted)
        except OSError as error:
            if error.errno != errno.EPERM: continue
        else: escaped('a lease', name)
""",
    "watches_of_the_user": """
import select
if T['shares_user']:
    try: select.epoll(); escaped('epoll')
    except OSError: pass
    if LIBC.inotify_init() >= 0: escaped('inotify')
import asyncio
asyncio.run(asyncio.sleep(0))
""",
    "keyrings": "calls('keyctl', 0, -3, 0); calls('add_key', b'user', b'x', b'y', 1, -3); calls('request_key', b'user', b'x', 0, 0)",
    "bpf": "calls('bpf', 0, bytes(72), 72); calls('bpf', 5, bytes(72), 72)",
    "io_uring": "calls('io_uring_setup', 8, bytes(120)); calls('io_uring_enter', 0, 0, 0, 0, 0)",
    "performance_counters": "calls('perf_event_open', struct.pack('II', 1, 112) + bytes(104), 0, -1, -1, 0)",
    "memory_map": """
if LIBC.prctl(35, 15, ctypes.byref(ctypes.c_uint()), 0, 0) == 0: escaped('PR_SET_MM')
""",
    "userfaultfd": "calls('userfaultfd', 1)",
    "personality": "calls('personality', 0x0040000); calls('personality', 0x0400000)",
    "kernel_modules": "calls('init_module', b'', 0, b''); calls('finit_module', 0, b'', 0); calls('kexec_load', 0, 0, 0, 0)",
    "file_handles": """
handle, number = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128)), ctypes.c_int()
calls('name_to_handle_at', -100, b'/usr', handle, ctypes.byref(number), 0); calls('open_by_handle_at', -100, handle, 0)
""",
    "machine": "calls('reboot', 0, 0, 0, 0); calls('swapon', b'x', 0); calls('acct', b''); calls('sethostname', b'x', 1); calls('syslog', 3, bytes(100), 100)",
    "hard_link": """
try: os.link('/usr/bin/true', 'true'); escaped('linked')
except OSError: pass
""",
    "up_and_out": """
if os.path.realpath('/work/../../../..') != '/': escaped()
os.chdir('/'); fd = os.open('/', os.O_RDONLY)
for _ in range(20): os.chdir('..')
if os.stat('.').st_ino != os.fstat(fd).st_ino: escaped()
""",
    "deep_directories": """
for _ in range(3000): os.mkdir('d'); os.chdir('d')
""",
    "many_files": """
for number in range(300_000): os.close(os.open(f'/tmp/{number}', os.O_CREAT))
escaped(number, 'files')
""",
    "delete_everything": "subprocess.run('rm -rf /work/* /work/.* /work /tmp/* /dev/shm/* /usr/bin /etc', shell=True, capture_output=True)",
    "other_python_and_shell": """
for name in ('sh', 'python', 'python3', 'echo', 'os.py', 'site.py', 'json.py', 'sitecustomize.py'):
    open(name, 'w').write('#!/bin/true\\nraise SystemExit(3)'); os.chmod(name, 0o755)
""",
    "invalid_text": "os.write(1, bytes(range(256))); os.write(2, b'\\xff\\xfe')",
    "odd_files_to_read": """
os.symlink('/etc/passwd', 'link'); os.symlink('/usr', 'folder'); os.symlink('/proc/1/environ', 'init'); os.mkfifo('pipe')
os.symlink('/', 'up')
""",
}
HARMLESS = (
    "home", "run_directory", "runtime_directory", "root_directory", "environments_of_others", "the_worker",
    "other_processes", "loopback", "abstract_socket", "socket_file", "write_tmp_of_the_host", "write_shm_of_the_host",
    "netlink", "keyrings", "new_namespaces",
)  # fmt: skip
"""Programs that change nothing on the host. Without a sandbox they get what they want, which shows that they try."""


class Host:
    """What a program could get at: secrets, sockets and processes of the worker."""

    def __init__(self, folder: Path) -> None:
        self.mark = f"penstock-escape-{secrets.token_hex(8)}"
        self.shm = Path(tempfile.mkdtemp(prefix="penstock-escape-", dir="/dev/shm"))
        secret = SECRET + os.urandom(8).hex()
        self.home = folder / "home"
        (self.home / ".ssh").mkdir(parents=True)
        for file in (self.home / ".ssh/id_ed25519", folder / "config.yaml", self.shm / "keys"):
            file.write_text(secret)
        os.environ |= {"PENSTOCK_NONCE": secret, "OPENAI_API_KEY": secret, "PENSTOCK_RUNTIME_DIR": str(self.shm)}
        self.sockets = [socket.create_server(("127.0.0.1", 0))]
        for address in (f"\0{self.mark}", str(self.shm / "bus")):
            self.sockets.append(socket.socket(socket.AF_UNIX))
            self.sockets[-1].bind(address)
            self.sockets[-1].listen()
        self.victim = subprocess.Popen(["sleep", "600"], env={"OPENAI_API_KEY": secret})
        os.set_inheritable(self.sockets[0].fileno(), True)
        self.given = [
            Path(tempfile.mkdtemp(prefix="penstock-given-", dir=outer), "project", "rewards")
            for outer in ("/tmp", "/dev/shm")
        ]
        for path in self.given:
            path.mkdir(parents=True)
            (path / "file").write_text("given")
        its = ARCHITECTURES[platform.machine()]
        self.targets = {
            "home": str(self.home),
            "run_dir": str(folder),
            "runtime_dir": str(self.shm),
            "mark": self.mark,
            "given": [*map(str, self.given)],
            "port": self.sockets[0].getsockname()[1],
            "pids": [os.getpid(), os.getppid(), self.victim.pid],
            "daemon": f"3600.{secrets.randbelow(10**9)}",
            "numbers": its.forbidden | its.to_others,
            "clone": its.clone,
            "shares_user": os.geteuid() != 0,
            "prlimit64": its.prlimit64,
        }

    def gained(self, name: str) -> list[str]:
        """Return what a program changed outside of its box."""
        gained = [str(path) for path in (Path("/tmp", self.mark), Path("/dev/shm", self.mark)) if path.exists()]
        for path in gained:
            Path(path).unlink()
        if self.victim.poll() is not None:
            gained.append("a process of the host was killed")
        if name == "daemon" and self._is_left():
            gained.append("a daemon is left")
        return gained

    def _is_left(self) -> bool:
        wanted = f"sleep\0{self.targets['daemon']}\0".encode()
        return any(read(path) == wanted for path in Path("/proc").glob("[0-9]*/cmdline"))

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for each in self.sockets:
            each.close()
        for path in (self.shm / "bus", self.shm / "keys"):
            path.unlink()
        self.shm.rmdir()
        for path in self.given:
            shutil.rmtree(path.parents[1])


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def attempt(host: Host, name: str) -> list[str]:
    """Run one program and return everything that is wrong afterwards."""
    limits = Limits(
        **{field: getattr(LIMITS, field) for field in Limits.__slots__ if field != "wall_s"},
        wall_s=WALL_S.get(name, 10.0),
    )
    with open_box(limits=limits, readable=host.given if name == "replace_what_it_sees_read_only" else ()) as box:
        started = time.monotonic()
        outcome = box.run(python("-S", "-c", PRELUDE + ESCAPES[name]), env={"TARGETS": json.dumps(host.targets)})
        wrong = [line for line in outcome.stdout.splitlines() if line.startswith("ESCAPED")]
        wrong += [] if name in ENDS else [*(f"failed: {outcome}" for _ in range(outcome.returncode != 0))]
        wrong += [f"took {time.monotonic() - started} s"] if time.monotonic() - started > 15 else []
        wrong += afterwards(box, name, outcome)
        alive = box.run(["sh", "-c", "echo alive; ls /proc | grep -c '^[0-9]'"], limits=LIMITS)
        wrong += [] if alive.stdout.startswith("alive\n") else [f"the box is broken: {alive}"]
    return wrong + host.gained(name)


WALL_S = {"endless": 0.5, "stopped": 0.5, "endless_fork_bomb": 1.0, "kill_init": 3.0}
ENDS = {
    "kill_everything", "kill_init", "endless", "stopped", "endless_fork_bomb", "flood", "flood_of_errors", "many_files",
    "delete_everything", "thread_bomb", "kill_the_host",
}  # fmt: skip
"""Programs that may end with an error or a signal."""


def afterwards(box: object, name: str, outcome: Outcome) -> list[str]:
    """Return what is wrong with an outcome, and with the box as its creator uses it."""
    wrong = []
    if len(outcome.stdout) > LIMITS.output_bytes or len(outcome.stderr) > LIMITS.output_bytes:
        wrong.append("too much output")
    if name in ("endless", "stopped") and outcome.exceeded != "wall_s":
        wrong.append(f"not ended in time: {outcome}")
    if name == "many_files" and outcome.returncode != 137:
        wrong.append(f"not killed: {outcome}")
    if name == "odd_files_to_read":
        for odd in ("link", "folder/bin/true", "init", "pipe", "up/etc/passwd"):
            try:
                wrong.append(f"read {odd}: {box.read(odd)!r}")  # type: ignore[attr-defined]
            except OSError:
                continue
        try:
            box.write("link", "x")  # type: ignore[attr-defined]
            wrong.append("wrote through a link")
        except OSError:
            pass
    if name == "other_python_and_shell":
        real = box.run(["sh", "-c", "echo real"]).stdout + box.run(python("-c", "import json; print('real')")).stdout  # type: ignore[attr-defined]
        wrong += [] if real == "real\nreal\n" else [real]
    return wrong


def main() -> None:
    select(sys.argv[1])  # type: ignore[arg-type]
    names = HARMLESS if sys.argv[1] == "none" else ESCAPES
    with tempfile.TemporaryDirectory() as folder:
        host = Host(Path(folder))
        try:
            print(json.dumps({name: attempt(host, name) for name in names}))
        finally:
            host.close()


if __name__ == "__main__":
    main()
