"""`penstock logs`."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from made_runs import make_run, penstock

from penstock.cli.logs import REDRAW_EVERY_S, Log
from penstock.observe import jsonl
from penstock.observe.log_lines import formatted
from penstock.supervisor.log_files import rotate


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    processes = {"controller": {"state": "exited"}, "env-0": {"state": "exited"}}
    run_dir = make_run(tmp_path / "a", "completed", processes=processes)
    (run_dir / "logs" / "env-0.log").write_text("".join(f"played {number}\n" for number in range(100)))
    (run_dir / "logs" / "controller.log").write_text("welcome\n")
    (run_dir / "logs" / "another.log").write_text("hello\nunfinished")
    return run_dir


def test_all_logs_are_shown_with_the_names_of_their_processes_in_front(run_dir: Path) -> None:
    lines = penstock("logs", run_dir, "-n", "2").stdout.splitlines()
    assert [[word.strip() for word in line.split("|")] for line in lines] == [
        ["controller", "welcome"],
        ["env-0", "played 98"],
        ["env-0", "played 99"],
        ["another", "hello"],
        ["another", "unfinished"],
    ]


def test_lines_with_times_are_shown_in_their_order_and_others_after_the_line_before(run_dir: Path) -> None:
    at = 1_795_400_000.0
    (run_dir / "logs" / "env-0.log").write_text(
        "".join(f"{formatted('env-0', f'turn {n}', at=at + n)}\nTraceback {n}\n" for n in (1, 3))
    )
    (run_dir / "logs" / "controller.log").write_text(f"{formatted('controller', 'step', level='WARNING', at=at + 2)}\n")
    (run_dir / "logs" / "another.log").unlink()
    lines = penstock("logs", run_dir).stdout.splitlines()
    assert [line.partition(" | ")[2].partition("Z ")[2] or line for line in lines] == [
        "INFO turn 1",
        "env-0      | Traceback 1",
        "WARNING step",
        "INFO turn 3",
        "env-0      | Traceback 3",
    ]
    assert penstock("logs", run_dir, "env-0").stdout.startswith("2026-11-23T")


def test_one_log_is_shown_as_it_is(run_dir: Path) -> None:
    assert penstock("logs", run_dir, "env-0", "-n", "1").stdout == "played 99\n"
    assert penstock("logs", run_dir, "env-0", "-n", "0").stdout == ""
    assert len(penstock("logs", run_dir, "env-0", "-n", "1000").stdout.splitlines()) == 100


def test_an_unknown_process_is_told_who_there_is(run_dir: Path) -> None:
    result = penstock("logs", run_dir, "env-1")
    assert result.exit_code == 1 and "controller, env-0, another" in result.stderr


def test_long_lines_and_brackets_are_left_as_they_are(run_dir: Path) -> None:
    line = "[bold]" + "x" * 1000
    (run_dir / "logs" / "env-0.log").write_text(f"{line}\n")
    assert penstock("logs", run_dir, "env-0").stdout == f"{line}\n"


def test_a_long_log_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"".join(b"%d %s\n" % (number, b"x" * 300) for number in range(10_000)))
    log = Log(path)
    assert [line.split()[0] for line in log.last(500)] == [str(number) for number in range(9500, 10_000)]


def test_what_a_progress_bar_drew_is_shown_as_it_was_last(run_dir: Path) -> None:
    (run_dir / "logs" / "env-0.log").write_bytes(b"loading\n 10%\r 50%\r100%\r\ndone\r\n")
    assert penstock("logs", run_dir, "env-0").stdout == "loading\n100%\ndone\n"


def test_a_progress_bar_that_goes_on_is_shown_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.touch()
    log = Log(path)
    with path.open("ab", buffering=0) as file:
        file.write(b" 1%\r 2%\r")
        assert list(log.new_lines(now=100.0)) == [" 2%"]
        file.write(b" 3%\r")
        assert list(log.new_lines(now=100.1)) == []
        file.write(b" 4%\r")
        assert list(log.new_lines(now=100.0 + REDRAW_EVERY_S)) == [" 4%"]
        file.write(b" 5%\r 6%\nnext\n")
        assert list(log.new_lines(now=106.0)) == [" 6%", "next"]


def test_following_goes_on_over_rotation_restart_and_emptying(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = Log(path)
    assert list(log.new_lines(0.0)) == []
    path.write_text("one\ntwo")
    assert list(log.new_lines(0.0)) == ["one"]
    with path.open("a") as file:
        file.write(" and a half\nthree\n")
    path.rename(tmp_path / "a.log.1")
    path.write_text("four\n")
    assert list(log.new_lines(0.0)) == ["two and a half", "three", "four"]
    path.write_text("5\n")
    assert list(log.new_lines(0.0)) == ["5"]


def test_a_rotation_as_the_supervisor_does_it_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("one\n")
    log = Log(path)
    assert list(log.new_lines(0.0)) == ["one"]
    with path.open("a") as file:
        file.write("two\nthr")
    rotate(path, max_bytes=1)
    with path.open("a") as file:
        file.write("ee\n4\n")
    assert list(log.new_lines(0.0)) == ["two", "three", "4"]
    log = Log(path)
    assert log.last(2)[-1] == "4" and log.last(10)[:2] == ["one", "two"]


def test_following_ends_with_the_run_and_misses_nothing(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running", processes={"env-0": {"state": "ready"}})
    (run_dir / "logs" / "env-0.log").write_text("first\n")

    def end() -> None:
        time.sleep(0.1)
        (run_dir / "logs" / "env-1.log").write_text("a new process\n")
        with (run_dir / "logs" / "env-0.log").open("a") as file:
            file.write("last\nwords")
        state = json.loads((run_dir / "state.json").read_text())
        jsonl.write_json(run_dir / "state.json", {**state, "status": "completed"})

    ending = threading.Thread(target=end)
    ending.start()
    lines = penstock("logs", run_dir, "-f").stdout.splitlines()
    ending.join()
    shown = [[word.strip() for word in line.split("|")] for line in lines]
    assert shown[0] == ["env-0", "first"]
    assert sorted(shown[1:]) == [["env-0", "last"], ["env-0", "words"], ["env-1", "a new process"]]
