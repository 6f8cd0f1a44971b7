"""The status of a run, read once or again and again."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock.observe import jsonl
from penstock.supervisor.procfs import identify
from penstock.supervisor.run_status import StatusReader, latest_decisions, status

NOW = 1_790_000_000.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    owner = identify(os.getpid())
    assert owner is not None
    state = {"format": 3, "run_id": "run", "lives": 1, "status": "running", "born": NOW, "started": NOW}
    jsonl.write_json(tmp_path / "state.json", state | {"supervisor": asdict(owner)})
    (tmp_path / "config.yaml").write_text("trainer:\n  steps: 9\n")
    return tmp_path


def add(path: Path, *records: dict[str, Any]) -> None:
    for record in records:
        jsonl.append(path, record)


def step(number: int, **figures: Any) -> dict[str, Any]:
    return {"step": number, "time": NOW + number, "reward": number / 10, **figures}


def constant(document: dict[str, Any]) -> str:
    """Return a status without what changes with the clock."""
    processes = [
        {**row, "age_seconds": 0, "cpu_seconds": 0, "cpu_cores": 0, "rss_bytes": 0} for row in document["processes"]
    ]
    return json.dumps(document | {"processes": processes, "wall_seconds": 0}, sort_keys=True)


def test_a_reader_that_follows_says_what_one_says_that_begins_now(run_dir: Path) -> None:
    reader = StatusReader(run_dir)
    pieces = [
        ("events.jsonl", {"time": NOW, "event": "state", "to": "starting", "actor": "supervisor", "reason": ""}),
        ("events.jsonl", {"time": NOW, "event": "attached", "name": "env-9"}),
        ("metrics.jsonl", step(1)),
        ("metrics.jsonl", step(2, ledger={"trained": 3})),
        ("timeline.jsonl", {"kind": "decision", "decider": "trigger", "time": NOW, "reason": "count", "groups": 3}),
        ("events.jsonl", {"time": NOW, "event": "alarm", "reason": "answers are cut"}),
        ("events.jsonl", {"time": NOW, "event": "rewound", "step": 1, "lost_steps": 1}),
        ("metrics.jsonl", step(2, reward=0.9)),
        ("timeline.jsonl", {"kind": "decision", "decider": "trigger", "time": NOW + 1, "reason": "time"}),
        ("events.jsonl", {"time": NOW + 9, "event": "stall", "waiter": "swap", "resource": "weights", "holder": "x"}),
        ("events.jsonl", {"time": NOW, "event": "left", "name": "env-9", "reason": "it said so"}),
        ("metrics.jsonl", step(3)),
    ]
    for name, record in pieces:
        add(run_dir / name, record)
        assert constant(reader.read()) == constant(StatusReader(run_dir).read()), record
    found = reader.read()
    assert found["progress"]["step"] == 3 and found["alarms"][0]["reason"] == "answers are cut"
    assert [line["reason"] for line in found["decisions"]] == ["time"] and len(found["stalls"]) == 1


def test_a_reader_begins_again_with_another_file(run_dir: Path) -> None:
    add(run_dir / "metrics.jsonl", step(1), step(2), step(3))
    reader = StatusReader(run_dir)
    assert reader.read()["progress"]["step"] == 3
    (run_dir / "metrics.jsonl").unlink()
    add(run_dir / "metrics.jsonl", step(1))
    assert reader.read()["progress"]["step"] == 1
    (run_dir / "config.yaml").write_text("trainer:\n  steps: 77\n")
    assert reader.read()["progress"]["steps"] == 77


def test_processor_use_is_measured_between_two_reads(run_dir: Path) -> None:
    reader = StatusReader(run_dir)
    assert reader.read()["processes"][0]["cpu_cores"] is None
    assert reader.read()["processes"][0]["cpu_cores"] is not None
    assert status(run_dir)["processes"][0]["cpu_cores"] is not None


def test_the_latest_decision_of_each_decider_is_found_in_any_text() -> None:
    lines = [
        {"kind": "decision", "decider": "a", "time": 1.0, "reason": 'says "decider": "b"'},
        {"process": "p", "kind": "train", "start": 1.0, "end": 2.0},
        {"kind": "decision", "decider": "b", "time": 2.0, "reason": "x", "group": 3},
        {"kind": "decision", "decider": "a", "time": 3.0, "reason": "y"},
        {"kind": "decision", "decider": "c", "time": "never", "reason": "y"},
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    assert latest_decisions(data) == {
        "a": {"decider": "a", "time": 3.0, "reason": "y"},
        "b": {"decider": "b", "time": 2.0, "reason": "x", "group": 3},
    }
    assert latest_decisions(b"") == {}


DEVICE = {"name": "H100", "number": "0", "used_bytes": 1, "total_bytes": 2}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (None, None),
        ([], []),
        ([DEVICE], [DEVICE]),
        ([DEVICE | {"more": 1}], [DEVICE]),
        ("cpu", None),
        ([DEVICE, 5], None),
        ([{"name": "H100"}], None),
    ],
)
def test_devices_of_a_process_are_shown_if_they_are_known(run_dir: Path, written: object, shown: object) -> None:
    state = json.loads((run_dir / "state.json").read_text())
    state["processes"] = {"trainer-0": {"state": "ready", "role": "trainer", "devices": written}}
    jsonl.write_json(run_dir / "state.json", state)
    supervisor, trainer = StatusReader(run_dir).read()["processes"]
    assert (supervisor["devices"], trainer["devices"]) == ([], shown)
