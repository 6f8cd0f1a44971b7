from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from penstock.config import Config
from penstock.observe import jsonl
from penstock.observe.summary import wall_seconds
from penstock.supervisor import run_journal
from penstock.supervisor.ownership import Owned, owning
from penstock.supervisor.procfs import identify
from penstock.supervisor.run_directory import RunRefused, open_run
from penstock.supervisor.run_journal import RunJournal, is_supervised, owner_of, read_state
from penstock.supervisor.states import IllegalTransition, ProcessState, RunState


def test_facts_that_are_kept_are_those_of_the_first_life(tmp_path: Path) -> None:
    RunJournal.create(tmp_path, run_id="r", runtime_dir=tmp_path).keep(tracking={"id": "first"})
    again = RunJournal.load(tmp_path)
    again.begin_again(runtime_dir=tmp_path, reason="resumed")
    again.keep(tracking={"id": "second"}, other=1)
    state = read_state(tmp_path)
    assert state is not None and (state["tracking"], state["other"], state["lives"]) == ({"id": "first"}, 1, 2)


def test_the_snapshot_and_the_history_change_together(tmp_path: Path) -> None:
    record = RunJournal.create(tmp_path, run_id="r", runtime_dir=tmp_path / "runtime")
    record.move(RunState.STARTING, actor="supervisor")
    record.move_process("env-0", ProcessState.STARTING, pid=7)
    record.move(RunState.FAILED, actor="env-0", reason="it broke")
    state = read_state(tmp_path)
    assert state is not None and state["status"] == "failed" and state["error"] == "it broke"
    assert state["processes"]["env-0"] == {"state": "starting", "pid": 7}
    owner = owner_of(state)
    assert owner is not None and owner.pid == os.getpid()
    events = [(event["event"], event.get("to", event.get("state"))) for event in jsonl.read(tmp_path / "events.jsonl")]
    assert events == [("state", "starting"), ("process", "starting"), ("state", "failed")]
    with pytest.raises(IllegalTransition):
        record.move(RunState.RUNNING, actor="supervisor")


def test_another_process_can_take_the_record_up(tmp_path: Path) -> None:
    RunJournal.create(tmp_path, run_id="r", runtime_dir=tmp_path).move(RunState.STARTING, actor="supervisor")
    RunJournal.load(tmp_path).move(RunState.FAILED, actor="janitor", reason="killed")
    assert RunJournal.load(tmp_path).status is RunState.FAILED


def test_a_run_has_one_supervisor_and_one_life(tmp_path: Path) -> None:
    config = Config(runs_dir=str(tmp_path), run_id="mine")
    with open_run(config) as run:
        assert "-mine." in run.runtime_dir.name
        with pytest.raises(Owned, match="already being supervised"), open_run(config):
            pass
    with pytest.raises(RunRefused, match="exists already"), open_run(config):
        pass


@pytest.mark.parametrize("left", ["lineage.json", "events.jsonl", "checkpoints/step_5", "pool/index"])
def test_a_directory_that_holds_a_run_without_its_state_is_not_taken_over(tmp_path: Path, left: str) -> None:
    (tmp_path / "mine" / left).mkdir(parents=True)
    config, told = (
        Config(runs_dir=str(tmp_path), run_id="mine"),
        r"a run without its state\.json: choose another run_id",
    )
    with pytest.raises(RunRefused, match=told), open_run(config):
        pass
    assert not (tmp_path / "mine" / "config.yaml").exists()


def test_a_supervisor_elsewhere_lives_as_long_as_its_run_is_owned(tmp_path: Path) -> None:
    own = identify(os.getpid())
    assert own
    elsewhere = dataclasses.replace(own, boot_id="of another machine")
    assert is_supervised(tmp_path, own) and not is_supervised(tmp_path, elsewhere)
    with owning(tmp_path):
        assert is_supervised(tmp_path, elsewhere)
        assert not is_supervised(tmp_path, dataclasses.replace(own, start_ticks=own.start_ticks - 5))
    assert is_supervised(tmp_path / "not mounted here", elsewhere), "nobody can know"


def test_another_life_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    record = RunJournal.create(tmp_path, run_id="r", runtime_dir=tmp_path / "runtime")
    record.move(RunState.STARTING, actor="supervisor")
    record.move_process("env-0", ProcessState.STARTING, pid=7)
    jsonl.append(tmp_path / "events.jsonl", {"event": "completed"})
    assert record.is_complete()
    again = RunJournal.load(tmp_path)
    again.begin_again(runtime_dir=tmp_path / "runtime", reason="resumed")
    state = read_state(tmp_path)
    assert state is not None
    assert (state["status"], state["lives"], state["processes"]) == ("pending", 2, {})
    states = [e["to"] for e in jsonl.read(tmp_path / "events.jsonl") if e["event"] == "state"]
    assert states == ["starting", "failed", "pending"]
    (exit_,) = [e for e in jsonl.read(tmp_path / "events.jsonl") if e.get("state") == "exited"]
    assert (exit_["name"], exit_["kind"]) == ("env-0", "lost")
    again.move(RunState.STARTING, actor="supervisor")
    assert not again.is_complete()


def test_a_life_that_was_killed_lasted_until_its_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_journal.time, "time", lambda: now)
    now = 100.0
    record = RunJournal.create(tmp_path, run_id="r", runtime_dir=tmp_path / "runtime")
    record.move(RunState.STARTING, actor="supervisor")
    now = 110.0
    record.note("joined")
    now = 86_400.0
    again = RunJournal.load(tmp_path)
    again.begin_again(runtime_dir=tmp_path / "runtime", reason="resumed")
    state = read_state(tmp_path)
    assert state is not None
    assert (state["started"], state["born"], state["lived_s"]) == (100.0, 86_400.0, 10.0)
    assert wall_seconds(state, now=86_405.0) == 15.0


def test_what_a_full_disk_keeps_from_being_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunJournal.create(tmp_path, run_id="r", runtime_dir=tmp_path / "runtime")

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(jsonl, "append", fail)
        full.setattr(jsonl, "write_json", fail)
        record.move(RunState.STARTING, actor="supervisor")
        assert "No space left" in capsys.readouterr().err
    record.move(RunState.RUNNING, actor="supervisor")
    assert [event["to"] for event in jsonl.read(tmp_path / "events.jsonl")] == ["starting", "running"]
    state = read_state(tmp_path)
    assert state is not None and state["status"] == "running"


def test_secrets_do_not_reach_the_disk(tmp_path: Path) -> None:
    config = Config.model_validate({"runs_dir": str(tmp_path), "rollout": {"api_key": "hunter2"}})
    with open_run(config) as run:
        text = (run.run_dir / "config.yaml").read_text()
    assert "hunter2" not in text and "api_key:" not in text
