"""What a process left in its runtime directory is read as its own only."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.ports import Beat, Report
from penstock.supervisor.reports import read_beat, read_report


def test_a_beat_is_its_own_process_s(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    path = tmp_path / "heartbeats" / "env-0.json"
    beat = {"pid": 7, "time": 1.5, "progress": 3, "doing": "Step"}
    path.write_bytes(json.dumps(beat).encode().ljust(256))
    assert read_beat(tmp_path, "env-0", 7) == Beat(time=1.5, progress=3, doing="Step")
    assert read_beat(tmp_path, "env-0", 8) is None
    assert read_beat(tmp_path, "env-1", 7) is None
    path.write_bytes(b'{"pid": 7, "ti')
    assert read_beat(tmp_path, "env-0", 7) is None


def test_a_predecessor_s_last_words_are_not_its_successor_s(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "env-0.json").write_text('{"time": 1.0, "pid": 7, "message": "it broke"}')
    assert read_report(tmp_path, "env-0", 7) == Report(time=1.0, message="it broke")
    assert read_report(tmp_path, "env-0", 8) is None
    assert read_report(tmp_path, "env-1", 7) is None
