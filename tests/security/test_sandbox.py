"""What a box does for its creator, with every backend of this machine."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import platform
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path, PosixPath

import ordinary_user
import pytest
import sandbox as benchmark

from penstock.cli.preflight import check_sandbox
from penstock.config import Config, load_config
from penstock.envs.worker_pool import WorkerProcess
from penstock.observe.summary import sandbox_of
from penstock.sandbox import (
    BoxEnded,
    Limits,
    SandboxUnavailable,
    confinement,
    control_groups,
    init_client,
    open_box,
    python,
    run,
    seccomp,
    select,
    why_not,
)
from penstock.sandbox.backends import SELECTED, Backend
from penstock.sandbox.control_groups import ControlGroups, HeldGroup, remove_abandoned
from penstock.sandbox.init_client import InitBox
from penstock.sandbox.launch import Launch, Plan
from penstock.sandbox.user_slots import UserSlot
from penstock.supervisor.launcher import LocalLauncher

EXAMPLES = Path(__file__).parents[2] / "examples"
integration = pytest.mark.integration
HOLD_A_GROUP = """
import sys, time
from pathlib import Path
from penstock.sandbox.control_groups import HeldGroup
print(HeldGroup.make(Path(sys.argv[1])).folder, flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["bubblewrap", *(pytest.param(name, marks=pytest.mark.long) for name in ("namespaces", "none"))])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Backend]:
    name: Backend = request.param
    if (reason := why_not(name)) is not None:
        pytest.skip(f"{name}: {reason}")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(SELECTED, "auto")
    select(name)
    yield name
    limit = time.monotonic() + 60
    while list(tmp_path.iterdir()):
        assert time.monotonic() < limit, "a work directory is left"
        time.sleep(0.01)
    confinement.cache_clear()


@integration
def test_what_goes_in_and_comes_out(backend: str) -> None:
    code = "import sys; print(sys.stdin.read()); print('oh', file=sys.stderr); sys.exit(7)"
    outcome = run(python("-c", code), stdin="é")
    assert (outcome.stdout, outcome.stderr, outcome.returncode, outcome.exceeded) == ("é\n", "oh\n", 7, None)


@integration
def test_a_large_input_and_no_reader(backend: str) -> None:
    text = "x" * (1 << 20)
    with open_box(limits=Limits(output_bytes=2 << 20)) as box:
        assert box.run(["cat"], stdin=text).stdout == text
        assert box.run(["true"], stdin=text).returncode == 0


@integration
def test_programs_of_a_box_share_its_files(backend: str) -> None:
    with open_box() as box:
        box.write("folder/given", "é")
        assert box.run(["sh", "-c", "cat folder/given; printf made > made"]).stdout == "é"
        assert box.read("made") == b"made"
        with pytest.raises(FileNotFoundError):
            box.read("missing")


@integration
def test_no_link_on_the_way_to_a_file_is_followed(backend: str) -> None:
    """Also none that leads to another folder below the work directory: a program could turn it in between."""
    with open_box() as box:
        box.write("real/inner/file", "given")
        box.run(["sh", "-c", "ln -s real link; ln -s inner real/link; ln -s file real/inner/link"])
        for name in ("link/inner/file", "real/link/file", "real/inner/link", "real/inner"):
            with pytest.raises(OSError, match=r"symbolic|directory|regular|argument"):
                box.read(name)
            with pytest.raises(OSError, match=r"symbolic|directory|regular|argument"):
                box.write(name, "forged")
        assert box.read("real/inner/file") == b"given"
        box.write("real/inner/file", "new")
        assert box.read("real/inner/file") == b"new"


class Subverted:
    """A box with an init that reads nothing from its socket."""

    def __init__(self) -> None:
        self.control, self.theirs = socket.socketpair()
        self.process = subprocess.Popen(["sleep", "600"])
        self.box = InitBox(self.process, self.control, "/work", Limits(wall_s=0.1), None)

    def close(self) -> None:
        self.process.kill()
        self.box.close()
        self.theirs.close()


def test_a_box_that_takes_no_request_holds_its_creator_up_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_client, "GRACE_S", 0.1)
    monkeypatch.setattr(init_client, "FILE_S", 0.1)
    large = "x" * (8 << 20)
    with closing(Subverted()) as subverted:
        with pytest.raises(TimeoutError):
            subverted.box.write("file", large)
        with pytest.raises(TimeoutError):
            subverted.box.start(["echo", large])
        assert subverted.box.run(["cat"], stdin=large).exceeded == "wall_s"
        assert subverted.process.wait(60) == -9
    with closing(Subverted()) as subverted:  # and one that does not even take the sockets of requests
        with pytest.raises((TimeoutError, BoxEnded)):
            while True:
                subverted.control.send(b"+" * 1000)
        with pytest.raises(TimeoutError):
            subverted.box.write("file", "")


@integration
@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", "a\0b"])
def test_names_lie_below_the_work_directory(backend: str, name: str) -> None:
    with open_box() as box:
        with pytest.raises(ValueError, match="not a path below"):
            box.read(name)
        with pytest.raises(ValueError, match="not a path below"):
            box.write(name, "x")


@integration
def test_limits_end_a_program(backend: str) -> None:
    with open_box(limits=Limits(wall_s=0.3)) as hurried:
        assert hurried.run(["sleep", "60"]).exceeded == "wall_s"
    with open_box() as box:
        busy = box.run(python("-S", "-c", "while True: pass"), limits=Limits(cpu_s=1, wall_s=300))
        assert (busy.exceeded, busy.returncode) == ("cpu_s", 137)
        assert box.run(["sh", "-c", "kill $$"]).returncode == 128 + 15
        assert box.run(["no-such-program"]).returncode == 127


@integration
def test_a_flood_keeps_its_beginning(backend: str) -> None:
    outcome = run(python("-c", "while True: print('x' * 1000)"), limits=Limits(file_bytes=1 << 16, output_bytes=100))
    assert outcome.stdout == "x" * 100


@integration
def test_output_that_was_written_before_the_end_is_kept(backend: str) -> None:
    outcome = run(["sh", "-c", "sleep 600 & setsid sleep 600 & echo started"])
    assert (outcome.stdout, outcome.exceeded) == ("started\n", None)


@integration
def test_a_long_lived_program_talks_over_its_socket(backend: str) -> None:
    ours, theirs = socket.socketpair()
    code = f"import socket; s = socket.socket(fileno={theirs.fileno()}); s.sendall(s.recv(9)[::-1]); s.recv(1)"
    with ours, open_box() as box:
        with theirs:
            program = box.start(python("-c", code), pass_fds=[theirs.fileno()])
        ours.sendall(b"hello")
        assert ours.recv(9) == b"olleh"
        assert box.run(["sh", "-c", "sleep 600 & echo"]).returncode == 0, "a run beside it ends only what it started"
        assert program.poll() is None
        with pytest.raises(TimeoutError):
            program.wait(0.01)
        program.kill()
        assert program.wait(60) == 137


@integration
def test_a_long_lived_program_ends_with_its_box(backend: str) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with open_box() as box, theirs:
            program = box.start(["sleep", "600"], pass_fds=[theirs.fileno()])
        assert ours.recv(1) == b""
        assert program.wait(60) == 137
        with pytest.raises(BoxEnded):
            box.run(["true"])


@integration
def test_a_box_outlives_the_thread_that_opened_it(backend: str) -> None:
    boxes = []
    thread = threading.Thread(target=lambda: boxes.append(open_box()))
    thread.start()
    thread.join()
    with boxes[0] as box:
        assert box.run(["echo", "here"]).stdout == "here\n"


@integration
def test_boxes_in_threads_have_nothing_in_common(backend: str) -> None:
    said: list[str] = []

    def work(number: int) -> None:
        with open_box() as box:
            box.write("name", str(number))
            said.append(box.run(["sh", "-c", "sleep 0.1; cat name; ls | wc -l"]).stdout)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(said) == [f"{number}1\n" for number in range(8)]


@integration
def test_deep_directories_end_with_the_box(backend: str) -> None:
    box = open_box()
    assert box.run(python("-S", "-c", "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')")).returncode == 0
    started = time.monotonic()
    box.close()
    assert backend == "none" or time.monotonic() - started < 5  # without mounts of its own it has to be emptied


@integration
def test_huge_arguments_and_odd_ones_are_an_outcome(backend: str) -> None:
    with open_box() as box:
        assert box.run(["echo", "x" * (4 << 20)]).returncode == 127
        assert box.run(["echo", "a\0b"]).returncode == 127
        assert box.run(["echo", "\udce9"]).returncode == 0
        assert box.run(["echo", "\ud800"]).returncode == 127
        assert box.run(["echo", "here"]).stdout == "here\n"


@integration
def test_readable_paths_can_be_read_and_not_written(backend: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = shown(tmp_path_factory.mktemp("given"))
    (folder / "file").write_text("given")
    if backend == "none":
        pytest.skip("nothing is hidden or protected")
    with open_box(readable=[folder]) as box:
        outcome = box.run(["sh", "-c", f"cat {folder}/file; echo x > {folder}/file"])
        assert outcome.stdout == "given", outcome
    assert (folder / "file").read_text() == "given"


CONNECT = """
import socket, sys
def attempt(make, *kind):
    try:
        made = make(socket.AF_UNIX, *kind)
        (made if make is socket.socket else made[0]).connect(sys.argv[1])
        print("connected", kind)
    except OSError:
        pass
for kind in (1, 2, 3, 5):
    attempt(socket.socket, kind)
    attempt(socket.socketpair, kind)
ours, theirs = socket.socketpair()
print("tried", ours.send(b"x"))
"""


@integration
@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_below_a_readable_path_cannot_be_reached(
    backend: str, kind: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = shown(tmp_path_factory.mktemp("s"))
    with socket.socket(socket.AF_UNIX, kind) as server:
        server.bind(str(folder / "bus"))
        (folder / "bus").chmod(0o777)
        if kind == socket.SOCK_STREAM:
            server.listen()
        with open_box(readable=[folder]) as box:
            outcome = box.run(python("-S", "-c", CONNECT, str(folder / "bus")))
    assert outcome.stdout == "tried 1\n" or (backend == "none" and "connected" in outcome.stdout), outcome


def shown(folder: Path) -> Path:
    """Return a folder that every user can read."""
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    return folder


@integration
@pytest.mark.parametrize("place", ["/tmp/x.py", "/dev/shm/folder/x.py", "/work/x.py", "/work/a/b/x.py", "/opt/a/x.py"])
def test_copied_files_can_be_read_and_not_replaced(backend: str, place: str) -> None:
    if backend == "none":
        pytest.skip("nothing is hidden or protected")
    existed = Path(place).exists()
    changes = f"echo x > {place}; mv {place} {place}.gone; mv {Path(place).parent} /tmp/gone; rm -f {place}"
    with open_box(copied={Path(place): b"given", Path("/usr/bin/sh"): b"not this"}) as box:
        assert box.run(["sh", "-c", f"cat {place}; {changes}"]).stdout == "given"
        assert box.run(["cat", place]).stdout == "given"
    assert Path(place).exists() == existed


@pytest.mark.parametrize("path", ["/tmp", "/dev/shm", "/work", "/dev", "/", "/tmp/../tmp"])
def test_the_directories_of_a_box_cannot_be_given_to_it(path: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be shown in a box, which has .* of its own there"):
        open_box(readable=[Path(path)])


def test_folders_in_writable_directories_are_held() -> None:
    """Those that lead to what a box reads. What the box reads is a mount of its own anyway."""
    given = (
        "/work/project/src",
        "/work/x/../lib/rewards",
        "/tmp/rewards",
        "/tmp/a/b",
        "/tmp/a/c",
        "/dev/shm/d/e",
        "/opt/f/g",
    )
    assert Plan(limits=Limits(), readable=tuple(map(Existing, given))).stays == [
        "/dev/shm/d", "/tmp/a", "/work/lib", "/work/project", "/work/x",
    ]  # fmt: skip
    inside = Plan(limits=Limits(), readable=(Existing("/tmp/a/b"), Existing("/tmp/a")))
    assert inside.stays == []


class Existing(PosixPath):
    def exists(self) -> bool:  # type: ignore[override]
        return True


@integration
def test_control_groups_hold_a_whole_box(backend: str) -> None:
    limits = Limits(memory_bytes=128 << 20, work_bytes=1 << 20, max_processes=16)
    with closing(ControlGroups(limits)) as groups:
        if not [folder for folder in groups.folders if list(folder.glob("memory.*max*"))]:
            pytest.skip("this user may make no control groups for memory")
    several = "import subprocess, sys\nfor _ in range(8): subprocess.Popen([sys.executable, '-S', '-c', HOLD])\n"
    hold = "import time; held = b'x' * (90 << 20); time.sleep(0.5); print('held', flush=True)"
    outcome = run(python("-S", "-c", f"HOLD = {hold!r}\n{several}import time; time.sleep(1.5)"), limits=limits)
    assert outcome.stdout.count("held") < 4
    assert not [folder for folder in groups.folders if folder.exists()]


HOLD_SOCKETS = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", 0))
pairs = []
for _ in range(int(sys.argv[1])):
    client = socket.create_connection(listener.getsockname())
    pairs.append((client, listener.accept()[0]))
for client, server in pairs:
    client.sendall(b"x" * 1000)
    assert server.recv(1000, socket.MSG_WAITALL) == b"x" * 1000
time.sleep(float(sys.argv[2]))
print("held", len(pairs))
"""


@integration
def test_a_box_has_few_sockets_because_no_limit_of_a_process_counts_their_buffers(backend: str) -> None:
    if backend == "none":
        pytest.skip("this backend shares the network of the machine, so sockets of other processes would count")
    few = run(python("-S", "-c", HOLD_SOCKETS, "20", "0.5"))
    assert (few.returncode, few.stdout) == (0, "held 20\n"), few
    many = run(python("-S", "-c", HOLD_SOCKETS, "100", "5"))
    assert (many.returncode, many.stdout) == (128 + signal.SIGKILL, ""), many
    pairs = "import socket, os, time\nfor _ in range(6):\n if not os.fork(): break\n"
    pairs += "held = [socket.socketpair() for _ in range(110)]; time.sleep(5); print('held')"
    assert "held" not in run(python("-S", "-c", pairs)).stdout


@integration
def test_control_groups_of_killed_workers_are_removed(tmp_path: Path) -> None:
    killed, living = (
        subprocess.Popen([sys.executable, "-c", HOLD_A_GROUP, tmp_path], stdout=subprocess.PIPE) for _ in range(2)
    )
    gone, kept = (Path(os.fsdecode(each.stdout.readline().strip())) for each in (killed, living) if each.stdout)
    killed.kill()
    killed.communicate()
    assert gone.exists()
    remove_abandoned(tmp_path)
    assert kept.exists() and not gone.exists()
    living.kill()
    living.communicate()


@integration
def test_a_living_process_of_another_pid_namespace_keeps_its_group(tmp_path: Path) -> None:
    group = HeldGroup.make(tmp_path)
    sweep = "import sys; from pathlib import Path; from penstock.sandbox import control_groups\n"
    sweep += "control_groups.remove_abandoned(Path(sys.argv[1])); print(*Path(sys.argv[1]).iterdir())"
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", sys.executable, "-c", sweep]
    found = subprocess.run([*apart, tmp_path], capture_output=True, text=True)
    if "unshare" in found.stderr:
        pytest.skip("this user may make no pid namespaces")
    assert found.stdout.strip() == str(group.folder), found.stderr
    group.remove()
    assert not group.folder.exists()


@integration
async def test_a_run_ends_without_control_groups_of_its_killed_workers(tmp_path: Path) -> None:
    with closing(ControlGroups(Limits())) as groups:
        name = f"{control_groups.PREFIX}{secrets.token_hex(8)}"
        abandoned = [folder.with_name(name) for folder in groups.folders]
    if not abandoned:
        pytest.skip("this user may make no control groups")
    async with LocalLauncher(run_dir=tmp_path, runtime_dir=tmp_path / "runtime", run_id="x"):
        for folder in abandoned:
            folder.mkdir()
    assert not [folder for folder in abandoned if folder.exists()]


@integration
@pytest.mark.parametrize("killed", ["worker", "supervisor", "both"])
def test_nothing_is_left_after_kill_9(backend: str, killed: str) -> None:
    assert benchmark.left_after(killed, within_s=30.0) == 0


@integration
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket", "ignore:unclosed <socket")  # of the dropped child
async def test_a_cancelled_opening_gives_everything_back(backend: str) -> None:
    opened, cancelled = threading.Event(), threading.Event()
    of_its_own = backend != "none" and os.getuid() == 0
    made: list[tuple[int, Path]] = []
    before = own_groups()

    def slow() -> InitBox:
        box = open_box()
        groups = [*own_groups() - before]
        made.append((int(box.run(["id", "-u"]).stdout), groups[0] if groups else Path("/missing")))
        assert not of_its_own or is_held_here(made[0][0])
        opened.set()
        cancelled.wait(60)
        return box

    starting = asyncio.create_task(WorkerProcess.start(slow))
    await asyncio.to_thread(opened.wait, 60)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    cancelled.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    ((uid, group),) = made
    assert not group.exists()
    assert not (of_its_own and is_held_here(uid))


@integration
def test_a_failed_opening_gives_everything_back(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    moves = itertools.count()
    before = own_groups()

    def fail(groups: ControlGroups, launcher: int) -> None:
        if next(moves):
            raise RuntimeError("no more groups")

    start = Launch.start
    monkeypatch.setattr(Launch, "start", lambda *given, **named: started.append(start(*given, **named)) or started[-1])
    monkeypatch.setattr(ControlGroups, "add", fail)
    with pytest.raises(RuntimeError, match="no more groups"):
        open_box()
    assert started[0].returncode is not None and own_groups() <= before


def own_groups() -> set[Path]:
    """Control groups that are named for this process. An earlier process with the same pid may have left some."""
    parents = [parent for parent, _ in control_groups._parents(Limits())]
    return {group for parent in parents for group in parent.glob(f"{control_groups.PREFIX}{os.getpid()}-*")}


def is_held_here(uid: int) -> bool:
    """Whether the lock that this process took on a user still holds. Another process may have taken it meanwhile."""
    inode = (Path("/run/penstock-sandbox") / str(uid)).stat().st_ino
    locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return any(line[-4] == str(os.getpid()) and line[-3].endswith(f":{inode}") for line in locks if line[1] == "FLOCK")


LIKE_A_CONTAINER = """
from penstock.sandbox import SandboxUnavailable, confinement, open_box, select
from penstock.sandbox.backends import may_mount
import sys
assert not may_mount()
select(sys.argv[1])
try:
    with open_box() as box:
        reads = "cat /etc/shadow; ls /root; grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status"
        print(box.run(["sh", "-c", reads]).stdout)
except SandboxUnavailable as error:
    print("refused", error)
"""


@integration
@pytest.mark.skipif(os.getuid() != 0, reason="only root can lack a capability of root")
@pytest.mark.parametrize("name", ["bubblewrap", "namespaces"])
def test_root_without_the_capability_to_mount_confines_or_refuses(name: str) -> None:
    drop, words = ["--bounding-set=-sys_admin", "--inh-caps=-sys_admin"], [sys.executable, "-c", LIKE_A_CONTAINER, name]
    ran = ordinary_user.run_with(drop, words, timeout=60)
    if ran.returncode and "unshare" in ran.stderr:
        pytest.skip(ran.stderr)
    none = "0" * 16
    is_confined = ran.stdout.split() == ["CapEff:", none, "CapBnd:", none, "NoNewPrivs:", "1"]
    assert is_confined or ("refused no sandbox can confine programs here" in ran.stdout), ran
    closed = subprocess.run(["setpriv", *drop, *words], capture_output=True, text=True, timeout=60, check=False)
    if ordinary_user.closed_folders():
        assert "Permission denied" in closed.stdout and "run unconfined as this user" in closed.stdout, closed


@integration
@pytest.mark.skipif(os.getuid() != 0, reason="only root has users to choose from")
def test_two_boxes_of_root_have_different_users() -> None:
    if why_not("bubblewrap") and why_not("namespaces"):
        pytest.skip("nothing confines here")
    with open_box() as one, open_box() as two:
        assert one.run(["id", "-u"]).stdout != two.run(["id", "-u"]).stdout


@pytest.mark.skipif(os.getuid() != 0, reason="only root has users to choose from")
def test_a_user_is_free_again_when_its_box_has_ended() -> None:
    first, second = UserSlot(), UserSlot()
    assert first.uid != second.uid
    first.close()
    again = UserSlot()
    assert again.uid <= first.uid
    second.close()
    again.close()


def test_where_nothing_confines_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SELECTED, "auto")
    monkeypatch.setattr("penstock.sandbox.backends.why_not", lambda backend: f"{backend} is not permitted")
    for example in ("python_tool", "shell_sandbox"):
        config = load_config(EXAMPLES / example / "run.yaml")
        confinement.cache_clear()
        with pytest.raises(SandboxUnavailable, match=r"apt-get install bubblewrap.*env\.sandbox: none"):
            check_sandbox(config)
    check_sandbox(load_config(EXAMPLES / "guess_number" / "run.yaml"))
    confinement.cache_clear()


def test_none_is_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SELECTED, "auto")
    monkeypatch.setattr("penstock.sandbox.backends.why_not", lambda backend: None if backend == "none" else "no")
    confinement.cache_clear()
    with pytest.raises(SandboxUnavailable):
        confinement()
    select("none")
    assert confinement() == "none"
    confinement.cache_clear()


def test_the_summary_says_which_sandbox_was_chosen(tmp_path: Path) -> None:
    assert sandbox_of(tmp_path) is None
    (tmp_path / "config.yaml").write_text("env:\n  name: single_turn\n  sandbox: none\n")
    assert sandbox_of(tmp_path) == "none"
    assert Config().env.sandbox == "auto"


ITS = seccomp.ARCHITECTURES["x86_64"]


def decide(
    machine: str, number: int, *arguments: int, audit: int | None = None, lone: bool = False, shares_user: bool = True
) -> int:
    """Run the filter, or that of a lone process, as the kernel does."""
    its = seccomp.ARCHITECTURES[machine]
    given = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, its.audit if audit is None else audit, 0, *given)
    program = seccomp.lone_instructions(machine) if lone else seccomp.instructions(machine, shares_user=shares_user)
    at, value = 0, 0
    while True:
        operation, if_true, if_false, constant = program[at]
        at += 1
        if operation == seccomp.LOAD:
            (value,) = struct.unpack_from("<I", data, constant)
        elif operation == seccomp.RETURN:
            return constant
        else:
            holds = {
                seccomp.JUMP_EQUAL: value == constant,
                seccomp.JUMP_SET: bool(value & constant),
                seccomp.JUMP_AT_LEAST: value >= constant,
            }[operation]
            at += if_true if holds else if_false


REFUSED = seccomp.ERROR | errno.EPERM


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_the_filter_decides_as_its_tables_say(machine: str) -> None:
    its = seccomp.ARCHITECTURES[machine]
    for name, number in its.forbidden.items():
        if name not in seccomp.CONDITIONAL:
            assert decide(machine, number) == REFUSED, name
    assert decide(machine, its.clone3) == seccomp.ERROR | errno.ENOSYS
    assert decide(machine, its.clone, 0x10000000 | 17) == decide(machine, its.clone, 0x20000) == REFUSED
    assert decide(machine, its.clone, 0x3D0F00) == decide(machine, its.clone, 17) == seccomp.ALLOW  # thread, fork
    assert decide(machine, its.forbidden["unshare"], 0x80) == REFUSED
    assert decide(machine, its.forbidden["unshare"], 0x400) == seccomp.ALLOW  # CLONE_FILES
    assert [family for family in range(50) if decide(machine, its.socket, family) == seccomp.ALLOW] == [2, 10]
    assert [family for family in range(50) if decide(machine, its.socketpair, family, 1) == seccomp.ALLOW] == [1]
    kinds = [kind for kind in range(8) if decide(machine, its.socketpair, 1, kind | 0x80800) == seccomp.ALLOW]
    assert not {2, 3} & {*kinds} and {1, 5} <= {*kinds}, "half of a pair of datagram sockets can connect elsewhere"
    assert decide(machine, its.ioctl, 0, 0x5412) == decide(machine, its.ioctl, 0, 1 << 32 | 0x5412) == REFUSED
    assert decide(machine, its.ioctl, 0, 0x5401) == seccomp.ALLOW
    assert decide(machine, its.setsockopt, 3, 1, 15) == REFUSED
    assert decide(machine, its.setsockopt, 3, 1, 2) == seccomp.ALLOW
    assert [code for code in range(1200) if decide(machine, its.fcntl, 3, code) == REFUSED] == [1024, 1026]
    for number in its.counted_by_user.values():
        assert decide(machine, number) == REFUSED
        assert decide(machine, number, shares_user=False) == seccomp.ALLOW
    assert decide(machine, its.prlimit64, 1) == REFUSED
    assert decide(machine, its.prlimit64, 0) == seccomp.ALLOW
    assert [decide(machine, its.prctl, option) for option in (35, 15)] == [REFUSED, seccomp.ALLOW]
    for number in (its.to_others[name] for name in seccomp.SCHEDULING):
        assert decide(machine, number, 1) == decide(machine, number, 0xFFFFFFFF) == REFUSED
        assert decide(machine, number, 0) == seccomp.ALLOW
    for name, process in seccomp.PRIORITIES.items():
        number = its.to_others[name]
        assert decide(machine, number, process, 0, 19) == seccomp.ALLOW
        assert decide(machine, number, process, 1, 19) == decide(machine, number, process + 2, 0, 19) == REFUSED
    assert decide(machine, its.forbidden["personality"], 0xFFFFFFFF) == seccomp.ALLOW
    assert decide(machine, its.forbidden["personality"], 0x40000) == REFUSED


@pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)
def test_the_filter_of_a_lone_process_decides_as_its_tables_say(machine: str) -> None:
    its = seccomp.ARCHITECTURES[machine]
    assert {decide(machine, number, lone=True) for number in its.to_others.values()} == {REFUSED}
    signals = {number for name, number in its.to_others.items() if "kill" in name or "signal" in name}
    assert {decide(machine, number, 1) for number in signals} == {seccomp.ALLOW}
    assert [code for code in range(50) if decide(machine, its.fcntl, 3, code, lone=True) == REFUSED] == [8, 10, 15]
    assert (
        decide(machine, its.ioctl, 3, 0x8901, lone=True) == decide(machine, its.ioctl, 3, 0x8902, lone=True) == REFUSED
    )
    assert decide(machine, its.ioctl, 3, 0x5401, lone=True) == decide(machine, its.clone3, lone=True) == seccomp.ALLOW
    assert decide(machine, its.prlimit64, 0, lone=True) == seccomp.ALLOW
    assert decide(machine, its.prlimit64, 1, lone=True) == REFUSED


def test_calls_of_other_architectures_end_the_process() -> None:
    assert decide("x86_64", 1, audit=0x40000003) == seccomp.KILL
    assert decide("x86_64", seccomp.X32_BIT | 1) == seccomp.KILL
    assert decide("aarch64", 1, audit=ITS.audit) == seccomp.KILL
    with pytest.raises(OSError, match="riscv64"):
        seccomp.program("riscv64", shares_user=True)


@pytest.mark.skipif(platform.machine() not in seccomp.ARCHITECTURES, reason="there is no filter for this processor")
def test_the_filter_has_the_form_of_the_kernel() -> None:
    program = seccomp.program(shares_user=True)
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096
