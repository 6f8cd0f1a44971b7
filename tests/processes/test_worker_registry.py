"""The controller's registry of environment workers that the run did not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import default_config
from penstock.observe import jsonl
from penstock.observe.recorder import Recorder
from penstock.observe.view import Plan, RunView
from penstock.processes.layout import stages
from penstock.processes.worker_registry import WorkerRegistry


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def workers(tmp_path: Path, clock: Clock) -> WorkerRegistry:
    config = default_config(["env.workers=0", "supervisor.silent_s=5.0", "env.name=games/my_env.py:Game"])
    return WorkerRegistry(config, tmp_path, Recorder(tmp_path), now=clock)


def view(run_dir: Path) -> RunView:
    view = RunView(plan=Plan(num_steps=1), status="running")
    for event in jsonl.read(run_dir / "events.jsonl"):
        view.see_event(event)
    return view


def test_who_says_nothing_for_long_is_lost_and_welcome_again(workers: WorkerRegistry, clock: Clock) -> None:
    workers.attach("a")
    workers.attach("b")
    clock.now = 4.0
    workers.hear("b")
    workers.hear("env-0")
    clock.now = 5.5
    assert workers.remove_silent() == ["a"]
    assert workers.remove_silent() == []
    assert not workers.has_left("a")
    workers.attach("a")
    clock.now = 9.5
    assert workers.remove_silent() == ["b"]


def test_who_said_goodbye_is_not_listened_to_any_more(workers: WorkerRegistry, clock: Clock) -> None:
    workers.attach("a")
    workers.leave("a")
    clock.now = 100.0
    assert workers.has_left("a") and workers.remove_silent() == []


def test_a_run_without_workers_says_what_to_type(
    workers: WorkerRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers.ask_for_worker()
    command = f"python {Path.cwd()}/games/my_env.py serve --run {tmp_path}"
    assert view(tmp_path).needs == command and command in view(tmp_path).phase
    assert command in capsys.readouterr().out
    workers.attach("a")
    workers.ask_for_worker()
    assert view(tmp_path).needs is None
    workers.leave("a")
    assert view(tmp_path).needs == command


def test_a_run_with_workers_of_its_own_asks_for_none(tmp_path: Path, clock: Clock) -> None:
    workers = WorkerRegistry(default_config([]), tmp_path, Recorder(tmp_path), now=clock)
    workers.ask_for_worker()
    workers.attach("a")
    workers.leave("a")
    assert view(tmp_path).needs is None


def test_without_workers_there_is_no_stage_for_them() -> None:
    roles = [[spec.role for spec in stage] for stage in stages(default_config(["env.workers=0"]))]
    assert roles == [["controller"], ["rollout", "trainer"]]
