"""What carries the mark of a dead supervisor is found and removed; what carries that of a living one never."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_sudden_death import janitor_of, state_of, until
from test_sudden_death import start as start_run

from penstock.observe import jsonl
from penstock.supervisor import procfs, runtime
from penstock.supervisor.ownership import owning
from penstock.supervisor.procfs import Identity, identify
from penstock.supervisor.run_journal import RunJournal, read_state
from penstock.supervisor.runtime import Found, Mark, Orphans
from penstock.supervisor.states import RunState

pytestmark = pytest.mark.integration

Start = Callable[[Mark], subprocess.Popen[bytes]]


def this_process() -> Identity:
    found = identify(os.getpid())
    assert found
    return found


def mark(base: Path, *, alive: bool = False, nonce: str = "n") -> Mark:
    """Of a run in `base` whose supervisor is this process, or one that had its pid before."""
    own = this_process()
    supervisor = own if alive else dataclasses.replace(own, start_ticks=own.start_ticks - 5)
    return Mark(run_dir=str(base / "run"), runtime_dir=str(base / "runtime"), nonce=nonce, supervisor=supervisor)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that carries a mark, and has a child of its own."""
    started: list[subprocess.Popen[bytes]] = []
    breed = "import subprocess, sys; subprocess.Popen(['sleep', '60'], env={}); print(flush=True); sys.stdin.read()"

    def start(mark: Mark) -> subprocess.Popen[bytes]:
        environment = {**os.environ, runtime.OWNER: mark.dumps()}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-c", breed], env=environment, **pipes)
        started.append(process)
        assert process.stdout and process.stdout.readline()
        return process

    yield start
    for process in started:
        for stat in procfs.family(lambda stat, pid=process.pid: stat.pid == pid, spare=set()):
            os.kill(stat.pid, 9)
        process.communicate()


@pytest.fixture
def runtime_dirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for runtime directories in the test's own corner only."""
    monkeypatch.setattr(runtime, "runtime_dirs", lambda: sorted(tmp_path.glob("*/runtime")))


def make(mark: Mark) -> Path:
    """The runtime directory that carries the mark, and the record of its run."""
    run_dir, runtime_dir = Path(mark.run_dir), Path(mark.runtime_dir)
    (run_dir / "logs").mkdir(parents=True)
    runtime_dir.mkdir()
    (runtime_dir / runtime.OWNER_FILE).write_text(mark.dumps())
    (runtime_dir / "weights").write_bytes(b"w")
    RunJournal.create(run_dir, run_id="a", runtime_dir=runtime_dir).move(RunState.STARTING, actor="test")
    jsonl.write_json(
        run_dir / "state.json", {**(read_state(run_dir) or {}), "supervisor": dataclasses.asdict(mark.supervisor)}
    )
    return runtime_dir


def of(found: Found, mark: Mark) -> Orphans | None:
    return next((each for each in found.orphans if each.mark == mark), None)


def test_orphans_go_and_what_lives_stays(tmp_path: Path, runtime_dirs: None, start: Start) -> None:
    dead, living = mark(tmp_path / "dead"), mark(tmp_path / "living", alive=True)
    directories = {each: make(each) for each in (dead, living)}
    orphan, member = start(dead), start(living)
    found = runtime.find_orphans()
    orphaned = of(found, dead)
    assert orphaned and of(found, living) is None
    assert [stat.pid for stat in orphaned.processes] == [orphan.pid]
    assert orphaned.directories == [directories[dead]]
    family = procfs.family(lambda stat: stat.pid == orphan.pid, spare=set())
    assert len(family) == 2
    assert runtime.remove_orphans(orphaned, living=found.living) == []
    assert orphan.wait(60) == -9
    assert not any(procfs.read_stat(stat.pid) == stat for stat in family)
    assert member.poll() is None and directories[living].exists() and not directories[dead].exists()
    assert (read_state(Path(dead.run_dir)) or {})["status"] == "failed"
    assert (read_state(Path(living.run_dir)) or {})["status"] == "starting"
    assert of(runtime.find_orphans(), dead) is None


def test_a_next_life_of_the_same_run_is_left_alone(tmp_path: Path, runtime_dirs: None, start: Start) -> None:
    before, after = mark(tmp_path / "run", nonce="before"), mark(tmp_path / "run", alive=True, nonce="after")
    runtime_dir = make(after)
    orphan = start(before)
    found = runtime.find_orphans()
    orphaned = of(found, before)
    assert orphaned and orphaned.directories == []
    runtime.remove_orphans(orphaned, living=found.living)
    assert orphan.wait(60) == -9
    assert runtime_dir.exists() and (read_state(Path(after.run_dir)) or {})["status"] == "starting"


def test_what_belongs_to_another_container_is_left_alone(tmp_path: Path, runtime_dirs: None) -> None:
    here, nowhere = mark(tmp_path / "here", nonce="here"), mark(tmp_path / "nowhere", nonce="nowhere")
    elsewhere = [
        dataclasses.replace(m, supervisor=dataclasses.replace(m.supervisor, pid_namespace="pid:[1]"))
        for m in (here, nowhere)
    ]
    for each in elsewhere:
        make(each)
    shutil.rmtree(elsewhere[1].run_dir)
    with owning(Path(elsewhere[0].run_dir)):
        found = runtime.find_orphans()
        assert of(found, elsewhere[0]) is None, "its run is owned"
    assert of(found, elsewhere[1]) is None, "its run cannot be seen from here"
    assert of(runtime.find_orphans(), elsewhere[0]) is not None, "nobody owns its run any more"


def test_a_supervisor_that_was_started_within_a_dead_run_is_spared(
    tmp_path: Path, runtime_dirs: None, start: Start
) -> None:
    dead = mark(tmp_path / "dead")
    nested = start(dead)
    identity = identify(nested.pid)
    assert identity
    member = start(dataclasses.replace(mark(tmp_path / "nested"), supervisor=identity))
    found = runtime.find_orphans()
    assert of(found, dead) is None and nested.pid in found.living
    runtime.remove_orphans(Orphans(mark=dead), living=found.living)
    assert nested.poll() is None and member.poll() is None


def test_what_does_not_say_whose_it_is_is_not_touched(tmp_path: Path, runtime_dirs: None) -> None:
    (tmp_path / "a" / "runtime").mkdir(parents=True)
    (tmp_path / "b" / "runtime").mkdir(parents=True)
    (tmp_path / "b" / "runtime" / runtime.OWNER_FILE).write_text("{torn")
    assert runtime.find_orphans().unmarked == [tmp_path / "a" / "runtime", tmp_path / "b" / "runtime"]


def test_a_claimed_directory_carries_the_mark_that_processes_get(tmp_path: Path) -> None:
    environment = runtime.claim(tmp_path / "runtime", run_dir=tmp_path / "run", nonce="secret")
    claimed = runtime.mark_of_directory(tmp_path / "runtime")
    assert claimed == Mark.loads(environment[runtime.OWNER])
    assert claimed and claimed.supervisor == this_process()
    assert (tmp_path / "runtime").stat().st_mode & 0o777 == 0o700


def test_a_held_runtime_directory_is_in_use_whatever_the_run_directory_says(tmp_path: Path, runtime_dirs: None) -> None:
    """As in two containers that share /dev/shm and have different directories at the path of the run."""
    base = tmp_path / "a"
    base.mkdir()
    (base / "run").mkdir()
    runtime.claim(base / "runtime", run_dir=base / "run", nonce="n")
    supervisor = dataclasses.replace(this_process(), pid_namespace="pid:[1]")
    elsewhere = dataclasses.replace(mark(base), supervisor=supervisor)
    (base / "runtime" / runtime.OWNER_FILE).write_text(elsewhere.dumps())
    found = runtime.find_orphans()
    assert of(found, elsewhere) is None and elsewhere not in [each.mark for each in found.foreign]


def test_the_names_of_runtime_directories_are_not_foreseen_and_never_reused(tmp_path: Path) -> None:
    taken = runtime.runtime_path("a")
    assert runtime.runtime_path("a") != taken and taken.name.startswith(f"penstock-{os.getuid()}-a.")
    make(mark(tmp_path))
    with pytest.raises(FileExistsError):
        runtime.claim(tmp_path / "runtime", run_dir=tmp_path / "other", nonce="n")


def test_a_real_run_whose_supervisor_and_janitor_were_killed_is_found_and_cleaned(tmp_path: Path) -> None:
    supervisor, run = start_run(tmp_path, "controller=steady", "env-0=breeds")
    until(lambda: state_of(run)["status"] == "running")
    os.kill(state_of(run)["processes"]["controller"]["pid"], signal.SIGSTOP)
    for pid in (janitor_of(supervisor), supervisor.pid):
        os.kill(pid, signal.SIGKILL)
    supervisor.wait()
    assert run.living() and run.runtime_dir.exists()
    mine = [each for each in runtime.find_orphans().orphans if each.mark.run_dir == str(run.run_dir)]
    assert len(mine) == 1 and mine[0].processes and mine[0].directories == [run.runtime_dir]
    assert runtime.remove_orphans_of(run.run_dir) == []
    assert not run.living() and not run.runtime_dir.exists()
    assert state_of(run)["status"] == "failed"
