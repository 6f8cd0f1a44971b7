"""Logs without lines and malformed marks, as another user or a program of the policy could leave them."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))

from made_runs import make_run, penstock

from penstock.cli.logs import TAIL_BYTES, Log
from penstock.observe.log_lines import LONGEST_LINE
from penstock.supervisor.procfs import identify
from penstock.supervisor.runtime import Mark


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "env-0.log"
    path.touch()
    os.truncate(path, 1 << 25)
    log = Log(path)
    assert log.last(10) == [] and len(log._unfinished) == TAIL_BYTES
    with path.open("ab") as file:
        file.write(b"\nlast\n")
    assert list(log.new_lines(0.0))[-1] == "last"


@pytest.mark.parametrize("field", ["run_dir", "runtime_dir", "nonce"])
@pytest.mark.parametrize("value", [["/"], None, 1, {"a": 1}, "a\0b", "\ud800"])
def test_a_mark_holds_plain_names(field: str, value: Any) -> None:
    own = identify(os.getpid())
    assert own
    mark = Mark(run_dir="/run", runtime_dir="/runtime", nonce="n", supervisor=own)
    assert Mark.loads(mark.dumps()) == mark
    assert Mark.loads(json.dumps({**dataclasses.asdict(mark), field: value})) is None


def test_many_logs_share_the_bytes_that_are_read(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "completed")
    for number in range(64):
        path = run_dir / "logs" / f"env-{number}.log"
        path.touch()
        os.truncate(path, 1 << 30)
    shown = penstock("logs", run_dir)
    assert shown.exit_code == 0 and len(shown.stdout) < 64 * 5 * LONGEST_LINE


def test_too_many_logs_are_shown_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path / "a", "completed")
    for number in range(3):
        (run_dir / "logs" / f"env-{number}.log").write_text(f"{number}\n")
    monkeypatch.setattr("penstock.cli.logs.MOST_LOGS", 2)
    refused = penstock("logs", run_dir)
    assert refused.exit_code == 1 and "has 3 logs: name a process to see one of them" in refused.stderr
    assert penstock("logs", run_dir, "env-1").stdout == "1\n"


def test_a_log_that_grows_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "env-0.log"
    path.write_text("first\n")
    log = Log(path)
    assert log.last(10) == ["first"]
    os.truncate(path, 4 * TAIL_BYTES)
    assert list(log.new_lines(0.0)) == [] and len(log._unfinished) == TAIL_BYTES
    os.truncate(path, 5 * TAIL_BYTES)
    assert list(log.new_lines(0.0)) == [] and len(log._unfinished) == TAIL_BYTES, "an endless line is not collected"
    path.rename(tmp_path / "env-0.log.1")
    os.truncate(tmp_path / "env-0.log.1", 9 * TAIL_BYTES)
    path.write_text("\nlast\n")
    *_, last = log.new_lines(0.0)
    assert last == "last"
