"""Another user of the machine prepares directories, links, pipes and processes. Nothing of theirs is taken for true,
written, removed or signalled; nothing is reached through a link.

We are root here, so that the other user can be a real one; a command of an ordinary user is tried at the end.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.config import Config
from penstock.observe import jsonl
from penstock.own_files import Foreign, is_ours, open_plain, own_directory, read_document, remove_tree
from penstock.supervisor import procfs, runtime
from penstock.supervisor.ownership import LOCK, owning
from penstock.supervisor.procfs import identify
from penstock.supervisor.run_directory import open_run, reopen_run
from penstock.supervisor.run_journal import RunJournal, read_state
from penstock.supervisor.runtime import Mark
from penstock.supervisor.states import RunState

OTHER, VICTIM = 54321, 54322
"""Users that no machine has."""
AS = "setpriv --reuid={user} --regid={user} --clear-groups"

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can be two users: run the tests as root, with setpriv (util-linux)",
)


def give(path: Path, user: int = OTHER) -> Path:
    """Give a file, or a directory with all that is in it, to another user; links themselves."""
    os.lchown(path, user, user)
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            give(inner, user)
    return path


def mark_of_the_dead(run_dir: Path, runtime_dir: Path) -> Mark:
    own = identify(os.getpid())
    assert own
    supervisor = dataclasses.replace(own, start_ticks=own.start_ticks - 5)
    return Mark(run_dir=str(run_dir), runtime_dir=str(runtime_dir), nonce="n", supervisor=supervisor)


def make_run(run_dir: Path, mark: Mark) -> Path:
    """A run that its supervisor left open."""
    (run_dir / "logs").mkdir(parents=True)
    journal = RunJournal.create(run_dir, run_id=run_dir.name, runtime_dir=Path(mark.runtime_dir))
    journal.move(RunState.STARTING, actor="test")
    document = {**(read_state(run_dir) or {}), "supervisor": dataclasses.asdict(mark.supervisor)}
    jsonl.write_json(run_dir / "state.json", document)
    (run_dir / "config.yaml").write_text("trainer: {steps: 9}\n")
    return run_dir


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where every user may make runtime directories, and every user may look."""
    directory = Path(tempfile.mkdtemp(prefix="penstock-test-", dir="/tmp"))  # the session's own is closed to others
    directory.chmod(0o1777)
    monkeypatch.setattr(runtime, "SHARED_MEMORY", directory)
    yield directory
    remove_tree(directory) or shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def mark(base: Path) -> Mark:
    """Of a run of ours whose supervisor is dead."""
    run_dir, runtime_dir = base / "ours", base / "penstock-0-ours.1"
    found = mark_of_the_dead(run_dir, runtime_dir)
    make_run(run_dir, found)
    return found


def marked(directory: Path, mark: Mark) -> Path:
    """A runtime directory that holds the mark."""
    directory.mkdir(mode=0o700)
    (directory / runtime.OWNER_FILE).write_text(mark.dumps())
    return directory


def found(mark: Mark) -> list[Path | int]:
    """What an orphan search holds for a leftover of this mark."""
    orphans = [each for each in runtime.find_orphans().orphans if each.mark == mark]
    return [what for each in orphans for what in (*each.directories, *(stat.pid for stat in each.processes))]


def test_a_runtime_directory_of_another_user_is_not_ours_to_remove(base: Path, mark: Mark) -> None:
    theirs = give(marked(base / "penstock-0-theirs.1", mark))
    ours = marked(Path(mark.runtime_dir), mark)
    assert found(mark) == [ours] and theirs not in runtime.find_orphans().unmarked
    assert runtime.remove_orphans_of(Path(mark.run_dir)) == []
    assert not ours.exists() and (theirs / runtime.OWNER_FILE).exists()


def test_a_link_in_place_of_a_runtime_directory_leads_nowhere(base: Path, mark: Mark) -> None:
    kept = marked(base / "kept", mark)
    for name, target in (("penstock-0-a", kept), ("penstock-0-b", Path("/etc"))):
        (base / name).symlink_to(target)
        give(base / name)
    (base / "penstock-0-c").symlink_to(kept)
    assert found(mark) == []
    assert not remove_tree(base / "penstock-0-c") and (kept / runtime.OWNER_FILE).exists()
    with pytest.raises(Foreign, match="is a link"), own_directory(base / "penstock-0-c"):
        pass


def test_a_mark_that_is_a_link_or_of_another_user_is_no_mark(base: Path, mark: Mark) -> None:
    (base / "mark").write_text(mark.dumps())
    linked, given = base / "penstock-0-linked", marked(base / "penstock-0-given", mark)
    linked.mkdir()
    (linked / runtime.OWNER_FILE).symlink_to(base / "mark")
    give(given / runtime.OWNER_FILE)
    assert found(mark) == [] and set(runtime.find_orphans().unmarked) == {given, linked}


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: Mark, *words: str, user: int = 0) -> subprocess.Popen[bytes]:
        environment = {runtime.OWNER: mark.dumps(), "PENSTOCK_NONCE": mark.nonce, "PATH": os.environ["PATH"]}
        environment["PENSTOCK_RUNTIME_DIR"] = mark.runtime_dir
        command = [*(AS.format(user=user).split() if user else []), *(words or ["sleep", "60"])]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        started.append(process)
        while not procfs._read(procfs.PROC / str(process.pid) / "cmdline").startswith((b"sleep", b"unshare", b"/")):
            assert process.poll() is None
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_process_of_another_user_with_our_mark_is_not_ours_to_kill(
    mark: Mark, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    theirs, ours = start(mark, user=OTHER), start(mark)
    assert found(mark) == [ours.pid]
    assert runtime.remove_orphans_of(Path(mark.run_dir)) == []
    assert ours.wait(60) == -signal.SIGKILL and theirs.poll() is None
    assert procfs.environment(theirs.pid) == []


HUGE_ENVIRONMENT = """
import ctypes, struct, sys, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
size = 32 << 20
at = libc.mmap(None, size, 1, 0x4022, -1, 0)
stat = open("/proc/self/stat").read().rpartition(")")[2].split()
ends = [line.split()[0].split("-")[1] for line in open("/proc/self/maps") if "[heap]" in line]
brk = int(ends[0], 16) if ends else int(stat[44])
before, after = ([int(stat[number - 3]) for number in numbers] for numbers in ((26, 27, 45, 46, 47), (28, 48, 49)))
new = struct.pack("=11QQIi", *before, brk, *after, at, at + size, 0, 0, -1)
print(libc.prctl(35, 14, ctypes.create_string_buffer(new), ctypes.c_ulong(len(new)), 0), flush=True)
time.sleep(60)
"""
"""With PR_SET_MM_MAP, a process declares any part of its memory to be its environment. Unwritten pages are free."""


def test_an_environment_of_another_user_is_not_even_read(tmp_path: Path) -> None:
    command = [*AS.format(user=OTHER).split(), shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3"]
    with subprocess.Popen([*command, "-c", HUGE_ENVIRONMENT], stdout=subprocess.PIPE, text=True) as theirs:
        try:
            assert theirs.stdout is not None
            if theirs.stdout.readline().strip() != "0":
                pytest.skip("this kernel does not let a process choose its environment")
            tracemalloc.start()
            found = procfs.environment(theirs.pid)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        finally:
            theirs.kill()
    assert found == [] and peak < 1 << 20


def test_a_process_in_a_sandbox_with_our_mark_is_not_ours_to_kill(
    mark: Mark, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    launcher = start(mark, "unshare", "--pid", "--fork", "--kill-child", "sleep", "60")
    children = procfs.PROC / f"{launcher.pid}/task/{launcher.pid}/children"
    limit = time.monotonic() + 60
    while not (child := children.read_text().strip()):
        if launcher.poll() is not None:
            pytest.skip("unshare --pid is not allowed here")
        assert time.monotonic() < limit
    assert procfs.environment(int(child)) == [] and found(mark) == [launcher.pid]


def test_a_set_user_id_program_that_another_user_started_is_not_ours(
    base: Path, mark: Mark, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    program = base / "sleep"
    shutil.copyfile(shutil.which("sleep") or "", program)
    program.chmod(0o4755)
    theirs = start(mark, str(program), "60", user=OTHER)
    uids = (procfs.PROC / str(theirs.pid) / "status").read_text().partition("Uid:")[2].split()[:2]
    if uids != [str(OTHER), "0"]:
        pytest.skip(f"set-user-id programs do not work in {base}")
    assert found(mark) == []


def test_a_mark_of_ours_that_names_the_run_of_another_user_is_told_and_left(
    base: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    bait = base / "bait"
    bait.write_text("root's own")
    run_dir = base / "theirs"
    mark = mark_of_the_dead(run_dir, base / "penstock-0-x")
    give(make_run(run_dir, mark))
    (run_dir / "events.jsonl").unlink()
    (run_dir / "events.jsonl").symlink_to(bait)
    process = start(mark)
    search = runtime.find_orphans()
    assert found(mark) == [] and [each.mark for each in search.foreign if each.mark == mark]
    runtime.close_abandoned(run_dir, mark.supervisor, [])
    assert process.poll() is None and bait.read_text() == "root's own"
    assert (read_state(run_dir) or {})["status"] == "starting" and not (run_dir / LOCK).exists()


def test_a_run_directory_that_was_exchanged_for_a_link_is_not_written(base: Path, mark: Mark) -> None:
    run_dir, kept = Path(mark.run_dir), base / "elsewhere"
    run_dir.rename(kept)
    run_dir.symlink_to(kept)
    runtime.close_abandoned(run_dir, mark.supervisor, [])
    assert (read_state(kept) or {})["status"] == "starting"


def test_what_is_owned_stays_the_same_directory_when_its_name_is_taken(base: Path, mark: Mark) -> None:
    run_dir, etc = Path(mark.run_dir), base / "etc"
    etc.mkdir()
    with owning(run_dir) as directory:
        run_dir.rename(base / "moved")
        run_dir.symlink_to(etc)
        (directory / "written").touch()
    assert (base / "moved" / "written").exists() and not list(etc.iterdir())


def test_a_directory_that_everyone_may_write_to_is_not_acted_upon(base: Path, mark: Mark) -> None:
    Path(mark.run_dir).chmod(0o777)
    with pytest.raises(Foreign, match="can be written to by every user"), owning(Path(mark.run_dir)):
        pass


def facts(directory: Path) -> dict[Path, tuple[int, ...]]:
    found = {path: path.lstat() for path in directory.rglob("*")}
    return {
        path: (each.st_ino, each.st_mode, each.st_uid, each.st_size, each.st_mtime_ns) for path, each in found.items()
    }


def plant(run_dir: Path, name: str, kind: str) -> None:
    """Put something else in place of a file of the run."""
    path = run_dir / name
    path.unlink(missing_ok=True)
    match kind:
        case "link":
            path.symlink_to("/etc/shadow")
        case "pipe":
            os.mkfifo(path)
        case "device":
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
        case "endless":
            path.touch()
            os.truncate(path, 1 << 40)
        case "hard link":
            path.hardlink_to(run_dir.parent / "bait")


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "endless", "hard link"])
@pytest.mark.parametrize("name", ["state.json", "config.yaml", "events.jsonl", LOCK, "logs/env-0.log"])
def test_no_command_waits_for_or_follows_what_is_put_in_place_of_a_file(
    base: Path, mark: Mark, name: str, kind: str
) -> None:
    if (name, kind) == ("logs/env-0.log", "endless"):
        pytest.skip("a log has no limit")
    (base / "bait").write_text("{}")
    run_dir = Path(mark.run_dir)
    with suppress(OSError):
        plant(run_dir, name, kind)
    assert stat.S_ISREG((run_dir / name).lstat().st_mode) == (kind in ("endless", "hard link"))
    give(run_dir)
    before = facts(run_dir)
    for words in (["status"], ["logs"], ["stop"], ["resume"], ["trajectories"]):
        said = CliRunner().invoke(app, [*words, str(run_dir)])
        assert "root:" not in said.output, "a line of the file behind the link"
        if words[0] in ("stop", "resume", "trajectories"):
            assert said.exit_code == 1 and "is the run of another user" in said.stderr
    assert facts(run_dir) == before and (base / "bait").read_text() == "{}"


@pytest.mark.parametrize("words", [[], ["env-0"]])
@pytest.mark.parametrize("kind", ["linked directory", "link", "pipe", "device"])
def test_logs_of_another_users_run_lead_nowhere(base: Path, mark: Mark, kind: str, words: list[str]) -> None:
    run_dir = Path(mark.run_dir)
    (base / "secret").mkdir()
    (base / "secret" / "env-0.log").write_text("root's own\n")
    if kind == "linked directory":
        (run_dir / "logs").rmdir()
        (run_dir / "logs").symlink_to(base / "secret")
    else:
        plant(run_dir, "logs/env-0.log", kind)
    give(run_dir)
    said = CliRunner().invoke(app, ["logs", str(run_dir), *words])
    assert said.exit_code == 1 and not said.stdout and "root" not in said.stderr.replace(str(base), "")
    assert f"{run_dir}/logs" in said.stderr and ("is a link" in said.stderr or "is no plain file" in said.stderr)


@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_a_lock_that_is_no_plain_file_is_neither_opened_nor_followed(mark: Mark, kind: str) -> None:
    plant(Path(mark.run_dir), LOCK, kind)
    with pytest.raises(OSError), owning(Path(mark.run_dir)):
        pass


@pytest.mark.parametrize("kind", ["link", "pipe", "device", "endless"])
def test_a_document_is_a_plain_file_of_a_bounded_size(mark: Mark, kind: str) -> None:
    path = Path(mark.run_dir) / "state.json"
    plant(path.parent, path.name, kind)
    with pytest.raises(OSError):
        read_document(path)
    assert read_state(path.parent) is None
    if kind != "endless":
        with pytest.raises(OSError), open_plain(path):
            pass


def test_a_run_is_not_begun_in_a_directory_that_another_user_prepared(base: Path) -> None:
    (base / "runs").mkdir()
    prepared = base / "runs" / "mine"
    prepared.mkdir()
    (prepared / "logs").symlink_to("/etc")
    give(prepared)
    with (
        pytest.raises(Foreign, match=f"belongs to user {OTHER}"),
        open_run(Config(runs_dir=str(base / "runs"), run_id="mine")),
    ):
        pass
    assert sorted(path.name for path in prepared.iterdir()) == ["logs"]
    prepared.rename(base / "runs" / "old")
    prepared.symlink_to(base / "runs" / "old")
    with pytest.raises(Foreign, match="is a link"), open_run(Config(runs_dir=str(base / "runs"), run_id="mine")):
        pass


def test_runs_of_other_users_are_not_listed(base: Path, mark: Mark) -> None:
    theirs = make_run(base / "theirs", mark)
    (base / "linked").symlink_to(theirs)
    give(theirs)
    listed = CliRunner().invoke(app, ["runs", "--runs-dir", str(base), "--json"]).stdout
    assert '"run_id": "ours"' in listed and "theirs" not in listed and "linked" not in listed


@pytest.mark.parametrize("share", ["private", "group", "everyone"])
def test_a_run_is_as_private_as_it_says_and_never_writable_to_others(base: Path, share: str) -> None:
    config = Config.model_validate({"runs_dir": str(base / "runs"), "run_id": "r", "share": share})
    umask = os.umask(0)
    try:
        with open_run(config) as run:
            (run.run_dir / "a-file").touch()
            mode = {"private": 0o700, "group": 0o750, "everyone": 0o755}[share]
            assert stat.S_IMODE(run.run_dir.stat().st_mode) == mode
            assert all(not path.stat().st_mode & 0o022 for path in [run.run_dir, *run.run_dir.rglob("*")])
            run.journal.move(RunState.STARTING, actor="test")
            run.journal.move(RunState.FAILED, actor="test")
        run.run_dir.chmod(0o701)
        with reopen_run(run.run_dir, []):
            assert stat.S_IMODE(run.run_dir.stat().st_mode) == 0o701, "a run keeps its mode"
        jsonl.write_json(run.run_dir / "state.json", {**(read_state(run.run_dir) or {}), "status": "failed"})
        with reopen_run(run.run_dir, ["share=everyone" if share != "everyone" else "share=private"]):
            assert stat.S_IMODE(run.run_dir.stat().st_mode) == (0o755 if share != "everyone" else 0o700)
    finally:
        assert os.umask(umask) == 0, "the umask of the caller is what it was"


def test_a_tree_of_any_depth_is_removed_and_no_link_in_it_is_followed(base: Path) -> None:
    kept = base / "kept"
    kept.mkdir()
    (kept / "file").touch()
    top = base / "deep"
    top.mkdir()
    number = os.open(top, os.O_RDONLY)
    for depth in range(3000):
        os.mkdir("d", dir_fd=number)
        os.symlink(kept, "link", dir_fd=number)
        inner = os.open("d", os.O_RDONLY, dir_fd=number)
        os.close(number)
        if depth % 500 == 0:
            os.fchown(inner, OTHER, OTHER)
            os.fchmod(inner, 0)
        number = inner
    os.close(number)
    assert remove_tree(top) and not top.exists() and (kept / "file").exists()


USER = """
import os, stat, subprocess, sys
from pathlib import Path
from penstock.own_files import remove_tree
top = Path(sys.argv[1])
for name in ("a", "a/b", "a/b/c"):
    (top / name).mkdir()
    (top / name / "file").touch()
(top / "a/b").chmod(0)
(top / "a").chmod(0)
assert remove_tree(top)
"""


def as_user(user: int, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    here = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    command = [*AS.format(user=user).split(), sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=here, cwd="/")


@pytest.fixture
def victim(base: Path) -> Path:
    """A directory of an ordinary user. Skips if such a user cannot reach the interpreter."""
    if as_user(VICTIM, "-c", "import penstock").returncode != 0:
        pytest.skip("an ordinary user cannot reach this interpreter: install it outside of root's home directory")
    directory = base / "victim"
    directory.mkdir()
    return give(directory, VICTIM)


def test_an_ordinary_user_removes_directories_without_any_permission(victim: Path) -> None:
    done = as_user(VICTIM, "-c", USER, str(victim))
    assert done.returncode == 0, done.stderr
    assert not (victim / "a").exists()


@pytest.mark.integration
def test_doctor_cleans_for_an_ordinary_user_what_is_theirs_and_nothing_else(
    base: Path, victim: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    name = f"penstock-{VICTIM}-{base.name}"
    run_dir, own_dir = victim / "run", base / f"{name}.1"
    mark = mark_of_the_dead(run_dir, own_dir)
    give(make_run(run_dir, mark), VICTIM)
    give(marked(own_dir, mark), VICTIM)
    theirs = give(marked(base / f"{name}.2", mark))
    (base / f"{name}.3").symlink_to(theirs)
    ours, other = start(mark, user=VICTIM), start(mark, user=OTHER)
    done = as_user(VICTIM, "-m", "penstock.cli.main", "doctor", "--clean", "--runs-dir", str(victim), TMPDIR=str(base))
    assert "all of it is gone" in done.stdout, done.stdout + done.stderr
    assert not own_dir.exists() and ours.wait(60) == -signal.SIGKILL
    assert other.poll() is None and (theirs / runtime.OWNER_FILE).exists() and (base / f"{name}.3").is_symlink()
    assert (read_state(run_dir) or {})["status"] == "failed" and is_ours(base)
