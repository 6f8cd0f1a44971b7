"""`penstock doctor`."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest
from made_runs import owner, penstock

import penstock as package
from penstock.cli import doctor
from penstock.supervisor import runtime

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> runtime.Found:
    """What `doctor` finds: nothing that is left over, and free space, whatever is really on the machine."""
    found = runtime.Found(orphans=[], living=set(), unmarked=[])
    monkeypatch.setattr(runtime, "find_orphans", lambda: found)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(10**12, 0, 10**12))
    return found


@pytest.fixture
def dead_run(tmp_path: Path, found: runtime.Found) -> Path:
    """The runtime directory of a run whose supervisor is gone."""
    directory = tmp_path / "runtime"
    directory.mkdir()
    fields = {"run_dir": str(tmp_path / "run"), "runtime_dir": str(directory), "nonce": "n"}
    mark = runtime.Mark(**fields, supervisor=owner(alive=False))
    (directory / runtime.OWNER_FILE).write_text(mark.dumps())
    found.orphans.append(runtime.Orphans(mark=mark, directories=[directory]))
    return directory


def test_a_healthy_machine_is_described(tmp_path: Path) -> None:
    result = penstock("doctor", "--runs-dir", tmp_path / "not" / "there")
    assert result.exit_code == 0, result.stdout
    for words in ("Python", "torch", "transformers", "memory", f"free in {tmp_path}", "/dev/shm", "port 8000"):
        assert words in result.stdout
    assert "no process and no runtime directory of a dead run" in result.stdout


def test_too_little_room_is_a_problem_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 10**6, 10**6))
    result = penstock("doctor", "--runs-dir", tmp_path)
    assert result.exit_code == 1
    assert "→ remove old runs" in result.stdout and "--shm-size" in result.stdout


def test_orphans_are_shown_and_removed_only_on_request(dead_run: Path) -> None:
    result = penstock("doctor")
    assert result.exit_code == 1 and str(dead_run) in result.stdout and "--clean" in result.stdout
    assert dead_run.exists()
    result = penstock("doctor", "--clean")
    assert result.exit_code == 0 and "all of it is gone" in result.stdout
    assert not dead_run.exists()


def test_what_says_nothing_of_its_owner_is_shown_and_left(tmp_path: Path, found: runtime.Found) -> None:
    found.unmarked.append(tmp_path)
    result = penstock("doctor", "--clean")
    assert result.exit_code == 0 and str(tmp_path) in result.stdout
    assert tmp_path.exists()


def test_the_version_is_told() -> None:
    assert penstock("--version").stdout == f"penstock {package.__version__}\n"
