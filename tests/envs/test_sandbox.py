"""What a program that a policy wrote may do, and what is left of it; with namespaces and without."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from penstock.envs import sandbox
from penstock.envs.sandbox import Limits, Outcome, python

pytestmark = pytest.mark.integration

BOTH = pytest.mark.parametrize("namespaces", [True, False], ids=["namespaces", "none"])


@pytest.fixture(autouse=True)
def fence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that permits namespaces, or on one that does not."""
    wanted = request.node.callspec.params["namespaces"] if hasattr(request.node, "callspec") else True
    if wanted and not sandbox.has_namespaces():
        pytest.skip("this machine permits no namespaces")
    monkeypatch.setattr(sandbox, "has_namespaces", lambda: wanted)


def run(code: str, directory: Path, limits: Limits | None = None, *, stdin: str = "") -> Outcome:
    return sandbox.run(python("-c", code), cwd=directory, stdin=stdin, limits=limits or Limits())


@BOTH
def test_what_goes_in_and_comes_out(tmp_path: Path, namespaces: bool) -> None:
    outcome = run("import sys; print(sys.stdin.read()); print('oh', file=sys.stderr); sys.exit(7)", tmp_path, stdin="é")
    assert (outcome.stdout, outcome.stderr, outcome.returncode, outcome.exceeded) == ("é\n", "oh\n", 7, None)


@BOTH
def test_it_works_where_it_is_told(tmp_path: Path, namespaces: bool) -> None:
    assert run("open('made', 'w').write('x')", tmp_path).returncode == 0
    assert (tmp_path / "made").read_text() == "x"


@BOTH
def test_a_program_that_waits_is_killed_in_time(tmp_path: Path, namespaces: bool) -> None:
    outcome = run("import time; time.sleep(60)", tmp_path, Limits(wall_s=0.3))
    assert outcome.exceeded == "wall_s"
    assert outcome.wall_s < 5


@BOTH
def test_a_program_that_computes_for_ever_is_killed(tmp_path: Path, namespaces: bool) -> None:
    outcome = run("while True: pass", tmp_path, Limits(cpu_s=1, wall_s=30))
    assert outcome.exceeded == "cpu_s"
    assert outcome.returncode == 137


@BOTH
def test_a_signal_shows_in_the_code(tmp_path: Path, namespaces: bool) -> None:
    assert run("import os; os.kill(os.getpid(), 15)", tmp_path).returncode == 128 + 15


@BOTH
def test_memory_is_refused(tmp_path: Path, namespaces: bool) -> None:
    outcome = run("'a' * (1 << 30)", tmp_path, Limits(memory_bytes=256 << 20))
    assert outcome.returncode == 1
    assert "MemoryError" in outcome.stderr


@BOTH
def test_files_end_at_their_limit(tmp_path: Path, namespaces: bool) -> None:
    outcome = run("open('big', 'wb').write(bytes(1 << 20))", tmp_path, Limits(file_bytes=1 << 16))
    assert outcome.returncode != 0
    assert (tmp_path / "big").stat().st_size <= 1 << 16


@BOTH
def test_of_a_flood_the_beginning_is_kept(tmp_path: Path, namespaces: bool) -> None:
    outcome = run("while True: print('x' * 1000)", tmp_path, Limits(file_bytes=1 << 16, output_bytes=100))
    assert outcome.stdout == "x" * 100


@BOTH
def test_children_do_not_outlive_it(tmp_path: Path, namespaces: bool) -> None:
    mark = f"3600.{os.getpid()}"
    outcome = run(f"import subprocess; subprocess.Popen(['sleep', '{mark}']); print('started')", tmp_path)
    assert outcome.stdout == "started\n"
    _until(lambda: not _sleeping(mark))


def test_nobody_leaves_a_namespace(tmp_path: Path) -> None:
    mark = f"3601.{os.getpid()}"
    code = f"import subprocess; subprocess.Popen(['sleep', '{mark}'], start_new_session=True); print('started')"
    assert run(code, tmp_path).stdout == "started\n"
    assert not _sleeping(mark)


def test_there_is_no_network_and_nobody_else(tmp_path: Path) -> None:
    code = "import os, socket; print(socket.if_nameindex()); print(sum(name.isdigit() for name in os.listdir('/proc')))"
    interfaces, processes = run(code, tmp_path).stdout.splitlines()
    assert interfaces == "[(1, 'lo')]"
    assert int(processes) <= 3


@pytest.mark.skipif(os.getuid() == 0, reason="the kernel does not limit root's processes")
def test_too_many_processes_are_refused(tmp_path: Path) -> None:
    code = "import subprocess\nfor _ in range(20): subprocess.Popen(['sleep', '60'])"
    assert "unavailable" in run(code, tmp_path, Limits(max_processes=8)).stderr


@BOTH
def test_our_keys_stay_here(tmp_path: Path, namespaces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    outcome = run("import os; print(dict(os.environ))", tmp_path)
    assert outcome.returncode == 0 and "PATH" in outcome.stdout
    assert "secret" not in outcome.stdout


@BOTH
def test_it_ends_with_its_caller(tmp_path: Path, namespaces: bool) -> None:
    mark = f"3602.{os.getpid()}"
    code = (
        f"from pathlib import Path; from penstock.envs import sandbox; sandbox.has_namespaces = lambda: {namespaces}; "
        f"sandbox.run(['sleep', '{mark}'], cwd=Path('.'), limits=sandbox.Limits(wall_s=60))"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as caller:
        _until(lambda: bool(_sleeping(mark)))
        caller.kill()
    _until(lambda: not _sleeping(mark))


def _sleeping(mark: str) -> list[psutil.Process]:
    found = [p for p in psutil.process_iter(["cmdline", "status"]) if p.info["cmdline"] == ["sleep", mark]]
    return [p for p in found if p.info["status"] != psutil.STATUS_ZOMBIE]


def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)
