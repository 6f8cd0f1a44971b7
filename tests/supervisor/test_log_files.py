"""Logs within bounds, and their last lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.supervisor.log_files import quote, rotate, tail


def test_a_log_within_its_bounds_is_left_alone(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("x" * 100)
    rotate(log, max_bytes=100)
    assert log.read_text() == "x" * 100 and list(tmp_path.iterdir()) == [log]


def test_the_two_latest_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    for number in range(4):
        log.write_text(f"{number}" * 101)
        rotate(log, max_bytes=100)
    assert log.read_text() == ""
    assert (tmp_path / "a.log.1").read_text() == "3" * 101
    assert (tmp_path / "a.log.2").read_text() == "2" * 101
    assert len(list(tmp_path.iterdir())) == 3


def test_a_process_goes_on_writing_where_it_did(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    with log.open("ab") as output:
        print_lines = "for line in iter(input, 'end'): print(line, flush=True)"
        process = subprocess.Popen([sys.executable, "-c", print_lines], stdin=subprocess.PIPE, stdout=output, text=True)
    with process:
        for line in ("first", "second"):
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
            while line not in log.read_text():
                assert process.poll() is None
            rotate(log, max_bytes=0)
        process.stdin.write("third\nend\n")
    assert log.read_text() == "third\n"
    assert tail(log) == ["second", "third"]


def test_a_log_that_cannot_be_copied_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "a.log"
    log.write_text("x" * 100)

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", fail)
    with pytest.raises(OSError, match="No space"):
        rotate(log, max_bytes=10)
    assert log.read_text() == "x" * 100 and list(tmp_path.iterdir()) == [log]


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {i}\n" for i in range(10_000)))
    assert tail(log, 2) == ["line 9998", "line 9999"]
    assert "line 9960" in quote(log) and "line 9959" not in quote(log)
    assert tail(tmp_path / "none.log") == []
    assert "is empty" in quote(tmp_path / "none.log")
