"""Environments in files: found, named, located and resolved, and never run by looking at them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock.config import ConfigError, load_config
from penstock.envs.discovery import MAX_SOURCE_BYTES, EnvironmentClass, Unreadable, discover
from penstock.envs.registry import locate, resolve

FILE = '''
"""Several classes."""
raise RuntimeError("run")

class Base:
    """What the games share.

    And more.
    """
    def reset(self, seed): ...
    def step(self, action): ...

class Game(Base):
    """A game."""
    async def step(self, action): ...

class Agent:
    async def play(self, llm, seed): ...

class Half:
    def reset(self, seed): ...

class _Private(Base): ...

class Shape(Protocol):
    def play(self, llm, seed): ...

class Round(Other): ...
class Other(Round): ...
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "games").mkdir()
    (tmp_path / "games" / "my_env.py").write_text(FILE)
    return tmp_path


def test_classes_are_found_without_running_the_file(folder: Path) -> None:
    found = [each for each in discover(folder) if isinstance(each, EnvironmentClass)]
    assert [(each.class_name, each.description) for each in found] == [
        ("Base", "What the games share."),
        ("Game", "A game."),
        ("Agent", ""),
    ]
    assert found[0].name == f"{folder / 'games' / 'my_env.py'}:Base"


def test_what_cannot_be_read_is_told_and_hides_nothing(folder: Path) -> None:
    (folder / "broken.py").write_text("class (")
    (folder / "binary.py").write_bytes(b"\xff\x00")
    found = list(discover(folder))
    assert {each.file.name for each in found if isinstance(each, Unreadable)} == {"broken.py", "binary.py"}
    assert sum(isinstance(each, EnvironmentClass) for each in found) == 3


@pytest.mark.parametrize("place", [".hidden", "site-packages", "__pycache__", "venv"])
def test_what_is_installed_or_hidden_is_not_looked_at(folder: Path, place: str) -> None:
    (folder / "games").rename(folder / place)
    (folder / place / "pyvenv.cfg").touch()
    assert list(discover(folder)) == []


def test_a_file_in_a_configuration_is_looked_for_beside_it_and_then_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = folder / "games" / "run.yaml"
    config.write_text("env: {name: my_env.py:Game}\n")
    assert load_config(config).env.name == f"{folder / 'games' / 'my_env.py'}:Game"
    monkeypatch.chdir(folder)
    (folder / "run.yaml").write_text("{}")
    named = load_config(config, ["env.name=games/my_env.py:Game"]).env.name
    assert named == f"{folder / 'games' / 'my_env.py'}:Game"


def test_a_file_is_located_without_being_run(folder: Path) -> None:
    file = str(folder / "games" / "my_env.py")
    assert locate(f"{file}:Game") == (file, "Game")
    with pytest.raises(ConfigError, match="cannot be imported: RuntimeError: run"):
        resolve(f"{file}:Game")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.py:Game", "there is no file .*nowhere.py"),
        ("my_env.py:Gaem", "has no class Gaem; there are Base, Game, Agent"),
        ("broken.py:Game", "cannot be read: SyntaxError"),
        ("empty.py:Game", "there is none with reset and step"),
    ],
)
def test_mistakes_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str) -> None:
    monkeypatch.chdir(folder / "games")
    Path("broken.py").write_text("class (")
    Path("empty.py").touch()
    with pytest.raises(ConfigError, match=message):
        locate(name)


def test_a_file_may_import_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_rules_of_the_game.py").write_text("REWARD = 0.25\n")
    text = "from my_rules_of_the_game import REWARD\nclass Game:\n    reward = REWARD\n    reset = step = None\n"
    (tmp_path / "my_env.py").write_text(text)
    found = resolve(f"{tmp_path / 'my_env.py'}:Game")
    assert found.reward == 0.25
    assert resolve(f"{tmp_path / 'my_env.py'}:Game") is found


def test_what_is_no_plain_file_of_some_size_is_not_read(folder: Path) -> None:
    os.mkfifo(folder / "pipe.py")
    (folder / "device.py").symlink_to("/dev/zero")
    (folder / "loop.py").symlink_to("loop.py")
    (folder / "large.py").write_bytes(b"#" * (MAX_SOURCE_BYTES + 1))
    (folder / "deep.py").write_text("x = " + "(" * 10_000)
    (folder / "minus.py").write_text("x = " + "-" * 100_000 + "1")
    (folder / "base.py").write_text(f"class A({'x.' * 3000}y):\n    def play(self): ...\n")
    (folder / "linked.py").symlink_to(folder / "games" / "my_env.py")
    found = list(discover(folder))
    names = {each.file.stem for each in found if isinstance(each, Unreadable)}
    assert names == {"pipe", "device", "loop", "large", "deep", "minus", "base"}
    assert sum(isinstance(each, EnvironmentClass) for each in found) == 6, "a link to a plain file is followed"
    with pytest.raises(ConfigError, match="cannot be read"):
        locate(f"{folder / 'minus.py'}:Game")


def test_bases_with_many_ways_to_each_other_are_looked_at_once(tmp_path: Path) -> None:
    names = [f"A{number}" for number in range(60)]
    lines = [f"class {name}({base}, {base}): ..." for name, base in zip(names, [*names[1:], "object"], strict=True)]
    (tmp_path / "many.py").write_text("\n".join(lines))
    assert list(discover(tmp_path)) == []
