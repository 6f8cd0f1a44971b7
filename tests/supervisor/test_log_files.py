"""Logs within bounds, and their last lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.supervisor.log_files import LogPosition, end_of, quote, rotate, tail


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
    assert tail(log, since=LogPosition()) == ["second", "third"]


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
    assert tail(log, 2, since=LogPosition()) == ["line 9998", "line 9999"]
    quoted = quote(log, LogPosition())
    assert "line 9960" in quoted and "line 9959" not in quoted
    assert tail(tmp_path / "none.log", since=LogPosition()) == []
    assert "nothing was written to" in quote(tmp_path / "none.log", LogPosition())


@pytest.mark.parametrize("num_rotated_before", [0, 1, 3])
def test_what_was_written_since_is_found_through_rotations(tmp_path: Path, num_rotated_before: int) -> None:
    log = tmp_path / "a.log"
    for number in range(num_rotated_before):
        log.write_text(f"long ago {number}\n")
        rotate(log, max_bytes=0)
    log.write_text("before\n")
    place = end_of(log)
    assert tail(log, since=place) == []
    told = []
    for number in range(3):
        told.append(f"since {number}")
        with log.open("a") as file:
            file.write(f"{told[-1]}\n")
        assert tail(log, since=place) == told[-2:]
        rotate(log, max_bytes=0)
        assert tail(log, since=place) == told[-1:]
