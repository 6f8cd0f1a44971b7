"""`python my_env.py serve`: which run it finds, and what it says if there is none."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from made_runs import make_run, owner, penstock

from penstock.cli.attach import attach, member_of, newest_run
from penstock.cli.refusal import Refused
from penstock.config import Config, ConfigError
from penstock.config.imports import load_file
from penstock.envs.adapter import Adapter
from penstock.envs.guess_number import GuessNumber
from penstock.envs.registry import means
from penstock.observe import jsonl
from penstock.processes.env import kinds_with
from penstock.supervisor.run_journal import read_state
from penstock.supervisor.runtime import claim

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "env_file" / "my_env.py"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(f"runs_dir: {tmp_path / 'runs'}\n")
    return path


def test_the_newest_run_that_goes_on_is_taken(config: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "old", "running", started=1000.0)
    new = make_run(tmp_path / "runs" / "new", "running", started=2000.0)
    make_run(tmp_path / "runs" / "over", "completed", started=3000.0)
    make_run(tmp_path / "runs" / "lost", "running", started=4000.0, alive=False)
    assert newest_run(config) == new


def test_a_configuration_with_a_run_id_means_that_run(config: Path, tmp_path: Path) -> None:
    config.write_text(f"{config.read_text()}run_id: old\n")
    old = make_run(tmp_path / "runs" / "old", "running", started=1000.0)
    make_run(tmp_path / "runs" / "new", "running", started=2000.0)
    assert newest_run(config) == old


def test_no_run_is_one_message_with_the_command_that_starts_one(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert attach(GuessNumber, None, config) == 1
    assert f"penstock train {config}" in capsys.readouterr().err
    config.write_text("env: {nam: x}\n")
    assert attach(GuessNumber, None, config) == 2
    assert "did you mean env.name" in capsys.readouterr().err


def test_a_run_that_has_ended_is_not_attached_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attach(GuessNumber, make_run(tmp_path / "a", "completed"), None) == 1
    assert "run a is completed" in capsys.readouterr().err


def test_only_what_the_run_itself_tells_makes_a_member(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    claim(run_dir / "runtime", run_dir=run_dir, nonce="secret")
    member = member_of(run_dir)
    assert (member.nonce, member.run_id, member.runtime_dir) == ("secret", "a", run_dir / "runtime")
    other = make_run(tmp_path / "b", "running")
    runtime_dir = {"runtime_dir": str(run_dir / "runtime"), "supervisor": dataclasses.asdict(owner(alive=True))}
    jsonl.write_json(other / "state.json", {**(read_state(other) or {}), **runtime_dir})
    with pytest.raises(Refused, match="nothing to attach to"):
        member_of(other)


def test_a_worker_of_another_environment_than_the_runs_is_not_let_in(tmp_path: Path) -> None:
    kind = load_file(EXAMPLE).NextLetter
    run = {"run_id": "x", "runs_dir": str(tmp_path)}
    own = Config.model_validate(run | {"env": {"name": f"elsewhere/{EXAMPLE.name}:NextLetter"}})
    assert kinds_with(kind, own) == {own.env.name: kind}
    with pytest.raises(ConfigError, match=r"^run x uses single_turn, but this file defines NextLetter$"):
        kinds_with(kind, Config.model_validate(run))
    with pytest.raises(ConfigError, match=r"run x uses other\.py:NextLetter, but"):
        kinds_with(kind, Config.model_validate(run | {"env": {"name": "other.py:NextLetter"}}))


def test_of_a_mixture_a_worker_brings_its_own_and_knows_the_others() -> None:
    kind = load_file(EXAMPLE).NextLetter
    mixture = {"guess": {"name": "guess_number"}, "letters": {"name": f"{EXAMPLE}:NextLetter"}}
    config = Config.model_validate({"env": {"mixture": mixture}})
    assert kinds_with(kind, config) == {"guess_number": GuessNumber, f"{EXAMPLE}:NextLetter": kind}


class Walk(gymnasium.Env[int, int]):
    """Of another library."""


class Waits:
    """Would hold up all others."""

    def play(self, llm: object, seed: int) -> float:
        return 0.0


def test_what_a_worker_brings_is_played_as_if_the_run_had_named_it() -> None:
    def brought(kind: Any) -> type:
        name = f"{Path(__file__).name}:{kind.__name__}"
        return kinds_with(kind, Config.model_validate({"env": {"name": name}}))[name]

    assert issubclass(brought(Walk), Adapter)
    with pytest.raises(ConfigError, match="play is a plain function"):
        brought(Waits)


@pytest.mark.parametrize(
    ("name", "is_meant"),
    [
        ("guess_number", True),
        ("penstock.envs.guess_number:GuessNumber", True),
        ("copies/guess_number.py:GuessNumber", True),
        ("single_turn", False),
        ("copies/guess_number.py:Other", False),
        ("copies/other.py:GuessNumber", False),
        ("gym:GuessNumber", False),
        ("atropos", False),
    ],
)
def test_a_class_is_known_by_its_name_and_that_of_its_file(name: str, is_meant: bool) -> None:
    assert means(name, GuessNumber) is is_meant


@pytest.mark.integration
def test_the_example_is_a_program() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(EXAMPLE), *words], capture_output=True, text=True, timeout=60)

    assert "--config" in run("serve", "--help").stdout
    assert "either --config FILE or --run RUN" in run("serve").stderr


def test_the_command_lists_classes_in_files() -> None:
    result = penstock("envs", EXAMPLE.parent)
    assert f"{EXAMPLE}:NextLetter" in result.stdout and "the answer is the one that follows" in result.stdout
    assert "guess_number" in penstock("envs").stdout
    in_file = penstock("envs", EXAMPLE)
    assert f"{EXAMPLE}:NextLetter" in in_file.stdout and "no environments in" not in in_file.stdout


def test_the_command_says_where_there_is_nothing_to_list(tmp_path: Path) -> None:
    missing = penstock("envs", tmp_path / "nope")
    assert (missing.exit_code, missing.stderr) == (1, f"error: there is no {tmp_path / 'nope'}\n")
    (tmp_path / "plain.py").write_text("class Plain:\n    pass\n")
    for place in (tmp_path, tmp_path / "plain.py"):
        found = penstock("envs", place)
        assert found.exit_code == 0 and f"no environments in {place}" in found.stdout
