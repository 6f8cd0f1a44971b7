"""Environments by name or import path; the command never imports a user's module."""

import sys
from pathlib import Path

import pytest

from penstock.config import Config, ConfigError
from penstock.envs.registry import available, locate, maker_by_tag, resolve
from penstock.ports.environment import TaskError
from penstock.types import Task


class Plain:
    """Waits on the event loop for what the event loop would have to answer."""

    def play(self, llm: object, seed: int) -> float:
        return 0.0


class Threaded(Plain):
    """Waits on a thread of its own."""

    blocking = True


def test_a_plain_play_is_refused_unless_it_gets_a_thread() -> None:
    with pytest.raises(ConfigError, match=r"play is a plain function.*`async def`.*`blocking = True`"):
        resolve(f"{__name__}:Plain")
    assert resolve(f"{__name__}:Threaded") is Threaded


def test_built_in_environments_resolve() -> None:
    for name in available().keys() - {"atropos"}:
        assert hasattr(resolve(name), "reset")


def test_programs_of_their_own_are_located_but_not_made() -> None:
    assert "atropos" in available() and locate("atropos")
    with pytest.raises(ConfigError, match="programs of their own"):
        resolve("atropos")


def test_a_module_in_the_working_directory_is_found_without_being_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_world.py").write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert locate("my_world:World") == ("my_world", "World")
    with pytest.raises(ConfigError, match="RuntimeError: imported"):
        resolve("my_world:World")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("singel_turn", "did you mean single_turn"),
        ("nowhere_at_all:World", "no module nowhere_at_all"),
        ("penstock.types:Task", "is not a class with reset"),
        ("penstock.types:Nothing", "penstock.types has no Nothing; there are .*Task"),
        ("nosuch", "known are single_turn, guess_number, atropos, or"),
        (__file__, "which class of it.*there are .*Quiz"),
    ],
)
def test_mistakes_are_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name)


class Quiz:
    """Needs a question and a level."""

    def __init__(self, task: Task, *, level: int = 0) -> None:
        self.question, self.level = task.payload["question"], level

    def reset(self, seed: int) -> tuple[str, dict[str, object]]:
        return self.question, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        return "", 0.0, True, False, {}


def test_a_task_is_played_in_the_environment_of_its_tag_and_purpose() -> None:
    quiz = {"name": f"{__name__}:Quiz"}
    mixture = {"game": {"name": "guess_number"}, "quiz": quiz, "hard": quiz | {"options": {"level": 3}}}
    validation = {"mixture": {"quiz": {"options": {"level": 9}}}}
    make = maker_by_tag(Config.model_validate({"env": {"mixture": mixture}, "validation": validation}))
    payload = {"question": "1+1"}
    made = {tag: make(Task(task_id="t", tag=tag, index=0, payload=payload)) for tag in mixture}
    assert type(made["game"]).__name__ == "GuessNumber"
    assert isinstance(made["quiz"], Quiz) and made["quiz"].level == 0
    assert isinstance(made["hard"], Quiz) and made["hard"].level == 3
    validated = make(Task(task_id="t", tag="quiz", index=0, purpose="eval", payload=payload))
    assert isinstance(validated, Quiz) and validated.level == 9


def test_a_task_without_what_its_environment_needs_is_named() -> None:
    make = maker_by_tag(Config.model_validate({"env": {"name": f"{__name__}:Quiz"}}))
    with pytest.raises(
        TaskError,
        match=r"Quiz \(test_registry.py:\d+\) finds no 'question'; task words/3 of data.source seeds has answer",
    ):
        make(Task(task_id="words/3", tag="Quiz", index=2, payload={"answer": "b"}))


class Subscripts(Quiz):
    """Takes the task for its row."""

    def __init__(self, task: Task) -> None:
        self.question = task["question"]  # type: ignore[index]


@pytest.mark.parametrize("options", [{"levle": 3}, {"name": 1}, {"task": 1}])
def test_options_that_a_class_does_not_take_are_a_misfit(options: dict[str, object]) -> None:
    make = maker_by_tag(Config.model_validate({"env": {"name": f"{__name__}:Quiz", "options": options}}))
    with pytest.raises(ConfigError, match=r"env.options .* do not fit .*Quiz: .*it is made with \(task"):
        make(Task(task_id="t", tag="Quiz", index=0, payload={"question": "?"}))


def test_what_a_constructor_raises_is_its_own() -> None:
    make = maker_by_tag(Config.model_validate({"env": {"name": f"{__name__}:Subscripts"}}))
    with pytest.raises(TypeError, match="not subscriptable"):
        make(Task(task_id="t", tag="Subscripts", index=0))
